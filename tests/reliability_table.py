def write(page, results):
    pass
