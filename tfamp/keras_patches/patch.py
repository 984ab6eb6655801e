"""A function of Keras or TensorFlow that is replaced: a row of `patches.UPSTREAM`."""

from typing import Any, NamedTuple

from tfamp.facts import names


class Patch(NamedTuple):
    """A function that is replaced.

    Attributes:
      what: What the patch is for, in the words of `Status`.
      owner: Class or module, as `pkgutil.resolve_name` takes it. Of a class, the base
        that defines the function has it replaced.
      name: Name of the function in it.
      needs: Other private names that the replacement uses.
      alias: Its key in `patches.BY_NAME`, where several have the name.
      is_hot: As for `hooks.Hook`.
    """

    what: str
    owner: str
    name: str
    needs: tuple[str, ...] = ()
    alias: str = ""
    is_hot: bool = False

    def lacks(self) -> list[str]:
        """Returns the names that this release does not have."""
        whole = f"{self.owner}{'.' if ':' in self.owner else ':'}{self.name}"
        return [name for name in (whole, *self.needs) if names.resolve(name) is None]

    def find(self) -> Any:
        """Returns the owner; None if this release does not have all the names."""
        if self.lacks():
            return None
        owner = names.resolve(self.owner)
        bases = getattr(owner, "__mro__", [owner])
        return next((base for base in bases if self.name in vars(base)), None)
