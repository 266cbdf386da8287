"""What an ordinary run takes of a cross product, and what it leaves to a night."""

import itertools

import pytest

from .conftest import is_in_sample, is_on_diagonal

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "sizes", ({"b": 2}, {"b": 2, "c": 3}, {"b": 3, "c": 2, "d": 2})
)
def test_each_value_once_and_each_combination_of_the_others(sizes):
    places = [range(12), *map(range, sizes.values())]
    taken = [
        combination
        for combination in itertools.product(*places)
        if is_on_diagonal(dict(zip("abcd", combination, strict=False)), "a", sizes)
    ]
    assert [first for first, *_ in taken] == list(range(12))
    others = {tuple(rest) for _, *rest in taken}
    assert others == set(itertools.product(*map(range, sizes.values())))


@pytest.mark.cross("letter", number=2)
@pytest.mark.parametrize("number", (0, 1))
@pytest.mark.parametrize("letter", "abcd")
def test_this_one_runs_on_the_diagonal(letter, number, request):
    on_diagonal = "abcd".index(letter) % 2 == number
    is_put_aside = request.node.get_closest_marker("nightly") is not None
    assert is_put_aside != on_diagonal


@pytest.mark.sample(3)
@pytest.mark.parametrize("place", range(7))
def test_this_one_runs_every_third(place, request):
    first = next(i for i in range(3) if is_in_sample(request.node, i, 3))
    is_put_aside = request.node.get_closest_marker("nightly") is not None
    assert is_put_aside == (place not in range(first, 7, 3))
