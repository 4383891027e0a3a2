"""What steps between releases do to the keys of a model: other names, shared tensors filled in, a whole other naming.

No tensor is changed: a key gets another name, or the same tensor under a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs.conversion.apply import convert_tensors
from ckptfs.conversion.families.decoder import no_numbers
from ckptfs.conversion.releases.steps import Model, Setting
from ckptfs.conversion.rules import Context, Side, Table
from ckptfs.errors import MappingError, MissingKeys, UnmatchedKeys
from ckptfs.formats.source import Item

PREFIX = "model."
"""Where trainers of some releases put the whole model; most keys may have it or not."""


def bare(key: str) -> str:
    """*key* without a leading ``model.``."""
    return key.removeprefix(PREFIX)


def renamed(model: Model, name: Callable[[str], str]) -> Model:
    """*model* under other names; `MappingError` when two keys get the same one."""
    result: Model = {}
    for key, item in model.items():
        new = name(key)
        if new in result:
            raise MappingError(f"{key} would be a second {new}; remove one of the two from the checkpoint")
        result[new] = item
    return result


@dataclass(frozen=True, slots=True)
class Rename:
    """Older key to newer key, whole, or the beginning of it where both end in a dot. A leading ``model.`` stays."""

    names: Mapping[str, str]

    def apply(self, model: Model, setting: Setting) -> Model:
        names = self.names if setting.up else {new: old for old, new in self.names.items()}
        heads = {old: new for old, new in names.items() if old.endswith(".")}

        def name(key: str) -> str:
            rest = bare(key)
            lead = key[: len(key) - len(rest)]
            head = next((old for old in heads if rest.startswith(old)), "")
            return lead + (heads[head] + rest[len(head) :] if head else names.get(rest, rest))

        return renamed(model, name)


@dataclass(frozen=True, slots=True)
class DropPrefix:
    """Downwards a leading ``model.`` goes; upwards keys stay as they are."""

    def apply(self, model: Model, setting: Setting) -> Model:
        return model if setting.up else renamed(model, bare)


@dataclass(frozen=True, slots=True)
class Tie:
    """Two keys of one tensor: one that is missing or None is filled with the other, in both directions.

    With *field*, only where that field of the ``model`` section is true (as it is by default). What is filled stands
    next to what it is filled with.
    """

    one: str
    two: str
    field: str | None = None

    def apply(self, model: Model, setting: Setting) -> Model:
        if self.field and not setting.section.get(self.field, True):
            return model
        partner = {self.one: self.two, self.two: self.one}
        result: Model = {}
        for key, item in model.items():
            rest = bare(key)
            if rest not in partner:
                result[key] = item
            elif key not in result:
                other = key[: len(key) - len(rest)] + partner[rest]
                both = _filled({key: item, other: model.get(other)})
                result |= {key: item} if both.get(other) is model.get(other) and both[key] is item else both
        return result


@dataclass(frozen=True, slots=True)
class TieSeq2Seq:
    """The three tables of an encoder-decoder model: head, decoder and encoder embedding. They are written last.

    Shared by all three: the first one that is there counts. Shared by two: a missing one is filled with the other.
    """

    head: str = "lm_head.weight"
    decoder: str = "decoder_embeddings.word_embeddings.weight"
    encoder: str = "encoder_embeddings.word_embeddings.weight"

    def apply(self, model: Model, setting: Setting) -> Model:
        names = (self.head, self.decoder, self.encoder)
        lead = PREFIX if any(PREFIX + name in model for name in names) else ""
        head, decoder, encoder = (lead + name for name in names)
        if decoder not in model:
            raise MissingKeys(setting.about.family, [decoder], "head and embeddings of the two sides belong together")
        tables = {key: model.get(key) for key in (head, decoder, encoder)}
        with_head = setting.section.get("share_embedding_weights", True)
        with_encoder = setting.section.get("share_encoder_decoder_embedding", True)
        if with_head and with_encoder:
            found = [item for item in tables.values() if item is not None and item.tensor is not None]
            if len({id(item.tensor) for item in found}) > 1:
                setting.warnings.append(
                    f"{head}, {decoder} and {encoder} are shared, but stored apart; the first stands for all"
                )
            tables = dict.fromkeys(tables, found[0] if found else tables[decoder])
        else:
            tables |= _filled({head: tables[head], decoder: tables[decoder]}) if with_head else {}
            tables |= _filled({encoder: tables[encoder], decoder: tables[decoder]}) if with_encoder else {}
        kept = {key: item for key, item in model.items() if key not in tables}
        return kept | {key: item for key, item in tables.items() if item is not None}


def _filled(pair: Mapping[str, Item | None]) -> Model:
    """A pair of shared tensors, each its own or else the other's; what neither has stays as it is."""
    there = [item for item in pair.values() if item is not None and item.kind != "none"]
    result: Model = {}
    for key, item in pair.items():
        if (item is None or item.kind == "none") and there:
            item = there[0]
        if item is not None:
            result[key] = item
    return result


@dataclass(frozen=True, slots=True)
class Naming:
    """A wholly other naming: *table* has the older keys on its Hugging Face side, the newer on its Cerebras side.

    *dims* gives what the way back to the older names wants to know, from the model's name and section,
    *as_hf* the part of ``config.json`` that the rules ask for, where that is named otherwise.
    """

    table: Table
    dims: Callable[[str, Mapping[str, Any]], dict[str, int]] = no_numbers
    as_hf: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

    def apply(self, model: Model, setting: Setting) -> Model:
        to: Side = "cs" if setting.up else "hf"
        section = setting.section
        model_name = setting.about.family
        dims = self.dims(model_name, section) if to == "hf" else {}
        context = Context(model_name, dims, self.as_hf(section), section)
        given = {bare(key): item for key, item in model.items()}
        tensors = {key: item.tensor for key, item in given.items() if item.tensor is not None}
        found, _, _ = convert_tensors(self.table, tensors, to, context, setting.drop_unmatched)
        made = {key: Item(key, "tensor", tensor=tensor) for key, tensor in found.items()}
        return made | self._others(given, to, context, setting.drop_unmatched)

    def _others(self, given: Model, to: Side, context: Context, drop_unmatched: bool) -> Model:
        """What is no tensor (old checkpoints have None for a shared one), under the new names."""
        frm: Side = "hf" if to == "cs" else "cs"
        result: Model = {}
        unmatched: list[tuple[str, str]] = []
        for key, item in given.items():
            found = None if item.tensor is not None else self.table.claim(frm, key, context)
            if found is not None and found[0].index is not None:
                for template in found[0].rule.side(to):
                    result[template.format(found[1])] = item
            elif item.tensor is None and found is None:
                unmatched.append((key, self.table.nearest(frm, key)))
        if unmatched and not drop_unmatched:
            raise UnmatchedKeys(context.model, unmatched)
        return result


def reverse(rename: Rename) -> Rename:
    """The same names, with older and newer changed round."""
    return Rename({new: old for old, new in rename.names.items()})
