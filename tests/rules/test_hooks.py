"""Two replacements of one function, put back in any order."""

import itertools

import pytest

from tfamp.keras_patches import hooks


class Owner:
    def value(self):
        return 1


def plus(number):
    return lambda original: lambda self: original(self) + number


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_original_is_back_whatever_is_removed_first(order):
    original = Owner.value
    made = [hooks.Hook(Owner, "value", plus(10**i)) for i in range(3)]
    assert Owner().value() == 112
    left = 112
    for i in order:
        made[i].remove()
        made[i].remove()  # Twice is as once.
        left -= 10**i
        assert Owner().value() == left
    assert Owner.value is original


def test_what_lies_over_a_hook_stays_and_the_hook_beneath_sleeps(monkeypatch):
    original, hook = Owner.value, hooks.Hook(Owner, "value", plus(1))
    theirs = lambda self, beneath=Owner.value: 10 * beneath(self)  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(Owner, "value", theirs)
        hook.remove()
        assert Owner.value is theirs and Owner().value() == 10
    Owner.value = original
