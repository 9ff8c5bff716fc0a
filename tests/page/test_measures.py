"""Which runs are compared with which."""

import pytest

from shoal.page.measures import baseline
from shoal.page.report_data import RunRecord, SeedGroup


def group(method, members=5, **form):
    config = {"method": method, "members": members, **form}
    entry = RunRecord(method, config, [], [], {}, None)
    return SeedGroup(entry.method, [entry])


class TestThePlainEnsembleThatAMethodIsComparedWith:
    def test_is_of_its_size(self):
        small, large, mine = group("ensemble", 2), group("ensemble", 5), group("kde", 5)
        assert baseline(mine, [small, large, mine]) is large

    def test_is_none_for_itself_or_where_there_is_none(self):
        plain, mine = group("ensemble"), group("kde", 3)
        assert baseline(plain, [plain, mine]) is None
        assert baseline(mine, [plain, mine]) is None

    @pytest.mark.parametrize("form", ["legacy", "calibrated"])
    def test_may_have_the_published_form_as_all_others(self, form):
        plain, mine = group("ensemble", **{form: True}), group("kde", **{form: True})
        assert baseline(mine, [plain, mine]) is plain
        assert baseline(plain, [plain, mine]) is None

    def test_is_of_the_same_form_where_there_are_both(self):
        plain, old = group("ensemble"), group("ensemble", legacy=True)
        groups = [plain, old, group("kde"), group("kde", legacy=True)]
        assert baseline(groups[2], groups) is plain
        assert baseline(groups[3], groups) is old
        assert baseline(groups[2], [old, groups[2]]) is old

    def test_has_the_same_settings_where_there_are_several(self):
        own, plain, longer = (
            group("ensemble", batches=batches, epochs=epochs)
            for batches, epochs in (("own", 4), ("common", 4), ("common", 9))
        )
        mine, theirs = group("kde", batches="common", epochs=4), group("kde", batches="own")
        groups = [own, plain, longer, mine, theirs]
        assert [baseline(each, groups) for each in groups] == [plain, None, plain, plain, own]
