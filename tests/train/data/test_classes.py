"""A class is its name, not its number, in whatever form Unicode writes it."""

import unicodedata

import pytest

from train.data.classes import class_numbers, same_classes

CAFE, FROM_A_MAC = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


def test_numbers_follow_names_in_any_order_and_form():
    assert CAFE != FROM_A_MAC
    assert class_numbers(["dog", FROM_A_MAC], [CAFE, "cat", "dog"]) == [2, 0]
    assert same_classes(["dog", FROM_A_MAC], [CAFE, "dog"])
    assert not same_classes(["dog"], ["cat"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["ant", "cat"], "^unknown classes ant; known are cat, dog$"),
        ([*"abcdefg"], "^unknown classes a, b, c, d, e and 2 more; known are cat, dog$"),
        ([CAFE, FROM_A_MAC], "^two classes have the name café$"),
    ],
)
def test_classes_that_do_not_match_are_named(names, message):
    with pytest.raises(ValueError, match=message):
        class_numbers(names, ["cat", "dog"])
