"""In what two text sections differ: the rules by which text became token ids."""

from __future__ import annotations

from kvformat.spec.context import Text

__all__ = ["other_rules"]


def other_rules(here: Text, wanted: Text) -> str | None:
    """The members in which they differ, with what both say; of a canary never which ids. None where they are equal.

    Unlike :func:`kvformat.extract.agreement.text_differences`, a member that only one side has is a difference.
    """
    found = []
    for member in sorted(Text.__struct_fields__):
        one, other = getattr(here, member), getattr(wanted, member)
        if one != other and member == "canary":
            found.append(f"canary: {'absent here' if one is None else 'only here' if other is None else 'other ids'}")
        elif one != other:
            found.append(f"{member}: {_shown(one)} here, {_shown(other)} wanted")
    return ", ".join(found) or None


def _shown(value: object) -> str:
    return "absent" if value is None else f"{value:.16}..." if isinstance(value, str) else str(value)
