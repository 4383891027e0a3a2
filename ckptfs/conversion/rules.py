"""Tensor tables: which Hugging Face keys are which Cerebras keys, written once for both directions.

A `Rule` connects key templates of the two sides, with the ops between them. A `Table` is a set of rules and has no
order: two rules that could claim the same key are an error when the table is first used. Family modules build their
rules with the functions at the end of this module.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from ckptfs.conversion.keys import Fields, Template, blank
from ckptfs.conversion.ops import Op, Sizes
from ckptfs.tensors.tensor import Tensor

Side: TypeAlias = Literal["hf", "cs"]
SIDES: tuple[Side, Side] = ("hf", "cs")


@dataclass(frozen=True, slots=True)
class Context:
    """What a table knows about the model: sizes, and the two configs (of the Cerebras one, the ``model`` section)."""

    model: str
    sizes: Sizes
    hf: Mapping[str, Any]
    cs: Mapping[str, Any]
    keys: Collection[str] = ()
    """The source's keys; empty before the conversion of the tensors."""


Generate: TypeAlias = Callable[[Context, Tensor], Tensor | None]
"""Generates a tensor that only one side has, from one of the rule's on that side; None: this model has none."""
When: TypeAlias = Callable[[Context], bool]
Choice: TypeAlias = Callable[[Context, Fields], int]
"""Which of a tensor's Hugging Face names is written: 0 for the rule's own, then the others in their order."""
IfPresent: TypeAlias = Literal["", "keep", "replace"]
BESIDE, AT_END = 0, 1
"""Positions of an `Extra`."""


@dataclass(frozen=True, slots=True)
class Second:
    """A `Generate` whose key is read where the rule's own key is missing, in models for which *when* holds."""

    generate: Generate
    when: When

    def __call__(self, context: Context, tensor: Tensor) -> Tensor | None:
        return self.generate(context, tensor)


@dataclass(frozen=True, slots=True)
class Extra:
    """A key that only one side has. *position*: `BESIDE` its rule's keys, `AT_END`, 2 behind these, and so on.

    *if_present* is for keys that other rules may write too: keep what they wrote, or replace it in its place. Such an
    extra has no claim on the key when it is read, and goes to the end where no other rule wrote it. *of* is the number
    of the rule's tensor that it is generated from.
    """

    template: Template
    generate: Generate
    position: int = BESIDE
    if_present: IfPresent = ""
    of: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors under the *hf* templates are, after *ops*, those under the *cs* templates.

    Where one side has no templates, the other side's keys are dropped. ``hf_extra``/``cs_extra`` are keys that exist
    on that side only: they are written next to the rule's own, and dropped when they are read. ``hf_also``/``cs_also``
    are other names that are read, set after set where the rule has several tensors. *over* names a field that
    numbers the tensors of one group (experts). *when* limits the rule to some configs. *hf_choice* says which name to
    write, where that depends on the model; the rule then has one Hugging Face tensor.
    """

    hf: tuple[Template, ...]
    cs: tuple[Template, ...]
    ops: tuple[Op, ...] = ()
    over: str | None = None
    hf_also: tuple[Template, ...] = ()
    cs_also: tuple[Template, ...] = ()
    hf_extra: tuple[Extra, ...] = ()
    cs_extra: tuple[Extra, ...] = ()
    when: When | None = None
    hf_choice: Choice | None = None

    def side(self, side: Side) -> tuple[Template, ...]:
        return self.hf if side == "hf" else self.cs

    def also(self, side: Side) -> tuple[Template, ...]:
        return self.hf_also if side == "hf" else self.cs_also

    def extras(self, side: Side) -> tuple[Extra, ...]:
        return self.hf_extra if side == "hf" else self.cs_extra

    def steps(self, to: Side) -> tuple[Op, ...]:
        """The ops that lead to that side."""
        return self.ops if to == "cs" else tuple(op.inverse() for op in reversed(self.ops))

    def written(self, to: Side, context: Context, fields: Fields) -> tuple[Template, ...]:
        """The templates of that side under which the tensors are written."""
        if to == "cs" or self.hf_choice is None:
            return self.side(to)
        return ((*self.hf, *self.hf_also)[self.hf_choice(context, fields)],)


@dataclass(frozen=True, slots=True)
class Claim:
    """A rule that takes a key: template number *index* of its side, None for a key that is dropped.

    *second* marks the key of a second copy. Where it holds, the key is read if the rule's own key is missing.
    """

    rule: Rule
    template: Template
    index: int | None
    second: When | None = None


@dataclass(frozen=True)
class Table:
    """A family's rules.

    Two rules without `when` that claim one key, or fields of a rule that do not agree, are a ValueError when the table
    is first used: checking those of all families would take a tenth of a mount's start.
    """

    rules: tuple[Rule, ...]

    @cached_property
    def _claims(self) -> dict[Side, dict[str, list[Claim]]]:
        """The claims of all rules, by the keys' blanked form; checked when the table is first used."""
        claims: dict[Side, dict[str, list[Claim]]] = {"hf": {}, "cs": {}}
        for rule in self.rules:
            _check_fields(rule)
            for side in SIDES:
                for claim in _claims_of(rule, side):
                    for text in claim.template.blanks() if not claim.template.open else ():
                        claims[side].setdefault(text, []).append(claim)
        for side in SIDES:
            for same in claims[side].values():
                _check_unique(side, same)
        return claims

    @cached_property
    def _open(self) -> dict[Side, list[Claim]]:
        return {side: [c for r in self.rules for c in _claims_of(r, side) if c.template.open] for side in SIDES}

    @cached_property
    def _seconds(self) -> dict[Side, frozenset[str]]:
        """Blanked forms of the keys that may be second copies: few, so that most keys need no further check."""
        return {
            side: frozenset(text for text, found in claims.items() if any(c.second for c in found))
            for side, claims in self._claims.items()
        }

    def check(self) -> None:
        """Raise ValueError for a table that cannot be used: see the class."""
        assert self._claims is not None

    def claim(self, side: Side, key: str, context: Context) -> tuple[Claim, dict[str, int | str]] | None:
        """The claim on *key*, with the key's fields; None when there is none."""
        return next(self._claims_on(side, key, context), None)

    def completed(self, side: Side, state: Mapping[str, Tensor], context: Context) -> dict[str, Tensor]:
        """*state* with second copies under the rules' own keys, where *state* lacks these."""
        result: dict[str, Tensor] = {}
        for key, tensor in state.items():
            if blank(key) not in self._seconds[side] and not self._open[side]:
                result[key] = tensor
                continue
            missing = []
            for claim, fields in self._claims_on(side, key, context):
                templates = (*claim.rule.side(side)[:1], *claim.rule.also(side))
                second = claim.second is not None and claim.second(context)
                own = [template.format(fields) for template in templates if second]
                missing += [] if any(name in state for name in own) else own[:1]
            result |= dict.fromkeys(missing or [key], tensor)
        return result

    def _claims_on(self, side: Side, key: str, context: Context) -> Iterator[tuple[Claim, dict[str, int | str]]]:
        for claim in (*self._claims[side].get(blank(key), ()), *self._open[side]):
            if claim.rule.when is None or claim.rule.when(context):
                fields = claim.template.match(key)
                if fields is not None:
                    yield claim, fields

    def nearest(self, side: Side, key: str) -> str:
        """The template of that side that looks most like *key*, or an empty string."""
        texts = [t.text for r in self.rules for t in (*r.side(side), *(e.template for e in r.extras(side)))]
        found = difflib.get_close_matches(key, texts, n=1, cutoff=0.4)
        return found[0] if found else ""


def _claims_of(rule: Rule, side: Side) -> Iterable[Claim]:
    for index, template in enumerate(rule.side(side)):
        yield Claim(rule, template, index)
    for index, template in enumerate(rule.also(side)):
        yield Claim(rule, template, index % max(1, len(rule.side(side))))
    for extra in rule.extras(side):
        if not extra.if_present:
            yield Claim(rule, extra.template, None, extra.generate.when if isinstance(extra.generate, Second) else None)


def _check_fields(rule: Rule) -> None:
    free = {rule.over} if rule.over else set()
    fields = {t.fields - free for t in (*rule.hf, *rule.cs)}
    if len(fields) > 1:
        raise ValueError(f"templates of one rule differ in their fields: {rule.hf} {rule.cs}")


def _check_unique(side: Side, claims: list[Claim]) -> None:
    """Two templates with the same blanked form collide unless a number distinguishes them.

    Several rules may generate one key: it is dropped when it is read, and the last rule writes it.
    """
    for i, one in enumerate(claims):
        for two in claims[i + 1 :]:
            if one.index is None and two.index is None:
                continue
            conditional = one.rule.when or two.rule.when
            if not conditional and one.rule is not two.rule and _overlap(one.template.text, two.template.text):
                raise ValueError(f"two rules claim the same {side} key: {one.template.text} and {two.template.text}")


def _overlap(one: str, two: str) -> bool:
    return all(_may_be(a, b) or _may_be(b, a) for a, b in zip(one.split("."), two.split("."), strict=True))


def _may_be(template: str, other: str) -> bool:
    return template == other or ("{" in template and ("{" in other or Template(template).match(other) is not None))


# ---------------------------------------------------------------------------------------------------- builders


def same(
    hf: str,
    cs: str,
    *ops: Op,
    hf_also: Iterable[str] = (),
    cs_also: Iterable[str] = (),
    hf_choice: Choice | None = None,
) -> Rule:
    """One tensor on each side."""
    return Rule((Template(hf),), (Template(cs),), ops, None, _all(hf_also), _all(cs_also), hf_choice=hf_choice)


def split(hf: str, cs: Iterable[str], *ops: Op) -> Rule:
    """One packed Hugging Face tensor, several Cerebras tensors; *ops* lead from one to several (`Split`, `Each`)."""
    return Rule((Template(hf),), _all(cs), ops)


def stack(hf: str, cs: str, *ops: Op, over: str) -> Rule:
    """Many Hugging Face tensors, numbered by the field *over* from 0 without gaps; one Cerebras tensor."""
    return Rule((Template(hf),), (Template(cs),), ops, over=over)


def hf_only(*keys: str) -> list[Rule]:
    """Hugging Face keys that are dropped, and never written."""
    return [Rule((Template(key),), ()) for key in keys]


def cs_only(*keys: str) -> list[Rule]:
    """Cerebras keys that are dropped, and never written."""
    return [Rule((), (Template(key),)) for key in keys]


def with_cs_extra(
    rule: Rule, generate: Mapping[str, Generate], *, position: int = BESIDE, if_present: IfPresent = ""
) -> Rule:
    """*rule*, which also writes these keys on the Cerebras side, and drops them when they are read."""
    return replace(rule, cs_extra=rule.cs_extra + _extras(generate, position, if_present))


def with_hf_extra(
    rule: Rule, generate: Mapping[str, Generate], *, position: int = BESIDE, if_present: IfPresent = ""
) -> Rule:
    """*rule*, which also writes these keys on the Hugging Face side, and drops them when they are read."""
    return replace(rule, hf_extra=rule.hf_extra + _extras(generate, position, if_present))


def only_when(when: When, *rules: Rule) -> list[Rule]:
    """*rules*, for models for which *when* holds."""
    return [replace(rule, when=when) for rule in rules]


def under(hf: str, cs: str, rules: Iterable[Rule]) -> list[Rule]:
    """*rules* with these prefixes in front of every key."""
    return [
        replace(
            rule,
            hf=tuple(t.prefixed(hf) for t in rule.hf),
            cs=tuple(t.prefixed(cs) for t in rule.cs),
            hf_also=tuple(t.prefixed(hf) for t in rule.hf_also),
            cs_also=tuple(t.prefixed(cs) for t in rule.cs_also),
            hf_extra=tuple(replace(e, template=e.template.prefixed(hf)) for e in rule.hf_extra),
            cs_extra=tuple(replace(e, template=e.template.prefixed(cs)) for e in rule.cs_extra),
        )
        for rule in rules
    ]


copy = Second(lambda context, tensor: tensor, lambda context: True)
"""A `Generate` that gives the same tensor again under a second name; read where the first is missing."""


def _all(texts: Iterable[str]) -> tuple[Template, ...]:
    return tuple(Template(text) for text in texts)


def _extras(generate: Mapping[str, Generate], position: int, if_present: IfPresent) -> tuple[Extra, ...]:
    return tuple(Extra(Template(text), one, position, if_present) for text, one in generate.items())
