"""Find the manifest of prepared data; of a mixture, the manifests of its sources as one."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.data.manifest import FORMAT, Manifest, SplitFacts, read_manifest
from nanogpt_hf.errors import DataError


class PreparedSource(NamedTuple):
    """One prepared source of a mixture."""

    name: str
    weight: int
    data: DataSection
    manifest: Manifest


@dataclass(frozen=True)
class MixedManifest(Manifest):
    """The manifests of a mixture's sources as one, which is not written: counts are sums, checksums are of theirs."""

    sources: tuple[PreparedSource, ...] = ()

    def content(self) -> dict[str, Any]:
        weights = ", ".join(f"{source.name} {source.weight}" for source in self.sources)
        return super().content() | {"weights": weights}


def find_manifest(data: DataSection) -> Manifest | None:
    """The manifest of prepared data, of a mixture one for all sources; None if a source is not prepared.

    Raises DataError for a manifest that is not ours, and for sources with different tokenizers.
    """
    if not is_mixture(data):
        return read_manifest(Path(data.dir))
    sources = []
    for name, weight, section in sources_of(data):
        manifest = read_manifest(Path(section.dir))
        if manifest is None:
            return None
        sources.append(PreparedSource(name, weight, section, manifest))
    return _mixed(sources)


def _mixed(sources: list[PreparedSource]) -> MixedManifest:
    first = sources[0].manifest
    for source in sources[1:]:
        if source.manifest.tokenizer_hash != first.tokenizer_hash:
            raise DataError(
                f"{source.data.dir}: prepared with another tokenizer than {sources[0].data.dir}; "
                "remove one of the folders to prepare it again"
            )
    manifests = [source.manifest for source in sources]

    def digest(parts: list[Any]) -> str:
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def total(splits: list[SplitFacts]) -> SplitFacts:
        checksums, answers = [split.sha256 for split in splits], [split.assistant_tokens for split in splits]
        return SplitFacts(
            *(sum(getattr(split, count) for split in splits) for count in ("documents", "tokens", "bytes")),
            assistant_tokens=None if None in answers else sum(answer or 0 for answer in answers),
            sha256=None if None in checksums else digest(checksums),
        )

    return MixedManifest(
        format=FORMAT,
        recipe={
            knob: value for knob, value in first.recipe.items() if all(m.recipe.get(knob) == value for m in manifests)
        },
        revision=f"sha256:{digest([manifest.revision for manifest in manifests])}",
        file_state=None,
        tokenizer_hash=first.tokenizer_hash,
        vocab_size=first.vocab_size,
        end_of_text_id=first.end_of_text_id,
        train=total([manifest.train for manifest in manifests]),
        validation=total([manifest.validation for manifest in manifests]),
        versions=first.versions,
        start_of_text_id=first.start_of_text_id,
        sources=tuple(sources),
    )
