"""The one way to replace a function of Keras or TensorFlow, and to put it back."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator

from tfamp.keras_patches import patches


class Hook:
    """A function in place of another; once inactive, it only calls that one.

    Args:
      owner: Class or module.
      name: Name of the function in it.
      make: Function of the original that returns what replaces it.
      is_hot: Whether each eager operator calls it: one call less then, and nobody else
        may patch it.
    """

    def __init__(self, owner, name: str, make: Callable, is_hot: bool = False):
        self.owner, self.name, self.active = owner, name, True
        self.original = original = vars(owner)[name]
        self._called = make(original)

        @functools.wraps(original)
        def method(*args, **kwargs):
            return self._called(*args, **kwargs)

        if is_hot:
            method = self._called
        else:  # Keras reads it without following wrappers.
            method.__signature__ = inspect.signature(original)  # pyright: ignore[reportFunctionMemberAccess]
        self.method, method.hook = method, self  # pyright: ignore[reportFunctionMemberAccess]
        setattr(owner, name, method)

    def remove(self):
        """Puts the original back, unless another patch lies over this one."""
        self.active, self._called = False, self.original
        if vars(self.owner).get(self.name) is self.method:
            original = self.original
            # One below may have been removed meanwhile.
            while (below := getattr(original, "hook", None)) and not below.active:
                if below.method is not original:
                    break
                original = below.original
            setattr(self.owner, self.name, original)


def around(function: Callable) -> Callable:
    """Returns the `make` of a `Hook`: the function is given the original first."""
    return lambda original: functools.partial(function, original)


def of_gradient(operator: str, function: Callable) -> Callable:
    """Returns the `make` of a `Hook` of `Registry.lookup`: one operator's gradient.

    TensorFlow lets nobody register another one. Each trace looks it up.

    Args:
      operator: The kind of operator.
      function: It is given the registered gradient first, then what that is given.
    """

    @around
    def lookup(original, registry, name):
        gradient = original(registry, name)
        return functools.partial(function, gradient) if name == operator else gradient

    return lookup


class HookGroup:
    """Hooks that go in together, and out together.

    A function that a release of Keras or TensorFlow does not have is left out.

    Args:
      **makes: By a function's name, a key of `patches.BY_NAME`: as `make` of `Hook`.
    """

    def __init__(self, **makes: Callable):
        self.patches = [patches.BY_NAME[name] for name in makes]
        self._makes, self._hooks = list(makes.values()), []

    def install(self) -> None:
        """Replaces the functions; idempotent. What was traced before stays."""
        rows = zip(self.patches, self._makes, strict=True) if not self._hooks else ()
        for patch, make in rows:
            if owner := patch.find():
                self._hooks.append((patch, Hook(owner, patch.name, make, patch.is_hot)))

    def remove(self) -> None:
        """Puts the originals back; idempotent. What was traced before stays."""
        while self._hooks:
            self._hooks.pop()[1].remove()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Scopes `install`; where the hooks are in already, they stay."""
        outer = bool(self._hooks)
        self.install()
        try:
            yield
        finally:
            if not outer:
                self.remove()

    def add_to(self, kind: type, name: str, make: Callable, patch=None) -> None:
        """Replaces a method of a class, where it is defined, while these are in force.

        Args:
          kind: The class.
          name: The method's name.
          make: As of `Hook`.
          patch: The patch that it belongs to; the group's first one if None.
        """
        owner = owner_of(kind, name)
        replaced = [(hook.owner, hook.name) for _, hook in self._hooks]
        if self._hooks and (owner, name) not in replaced:
            self._hooks.append((patch or self.patches[0], Hook(owner, name, make)))

    def in_force(self) -> list[str]:
        """What is replaced now."""
        return [patch.what for patch, _ in self._hooks]


def owner_of(kind: type, name: str) -> type:
    """Returns the class, this one or a base, that defines a method."""
    return next(base for base in kind.__mro__ if name in vars(base))


@contextlib.contextmanager
def replaced(attributes: list) -> Iterator[None]:
    """Scopes attributes of objects, as functions for methods: (object, name, value).

    On the objects: the class is every other model's too.
    """
    own = [
        {name: vars(x)[name]} if name in vars(x) else {} for x, name, _ in attributes
    ]
    try:
        for owner, name, value in attributes:
            vars(owner)[name] = value
        yield
    finally:
        for (owner, name, _), before in zip(attributes, own, strict=True):
            vars(owner).pop(name, None)
            vars(owner).update(before)
