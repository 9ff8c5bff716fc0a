"""Common corruptions of images at five severities, Hendrycks & Dietterich (2019), arXiv 1903.12261.

There are fifteen standard corruptions and four extra ones. Each is a function in the file of its
family, with the published constants for 32 x 32 images. Corruptions are computed for whole batches
on the device of the images. Importing this package registers all of them.
"""

# the order of the list; the first four families are the standard corruptions
from shoal.data.corruptions import noise, blur, weather, digital, extra  # noqa: I001
from shoal.data.corruptions.registry import SEVERITIES, Corruption, corruption, registry
from shoal.data.corruptions.shifts import PublishedFiles, corrupt, parse_shift, with_corruptions

__all__ = [
    "SEVERITIES",
    "Corruption",
    "PublishedFiles",
    "blur",
    "corrupt",
    "corruption",
    "digital",
    "extra",
    "noise",
    "parse_shift",
    "registry",
    "weather",
    "with_corruptions",
]
