"""The audit: some records computed again from their stored inputs, and compared with what is stored."""

from __future__ import annotations

import os
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

from kvformat.errors import InputError
from kvformat.extract.agreement import context_differences, text_differences, text_of
from kvformat.extract.audit_report import AuditReport, Findings
from kvformat.extract.inputs import require_inputs
from kvformat.extract.join import check_documents
from kvformat.extract.sampling import sample_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvformat.interfaces import Extractor
    from kvformat.read.dataset import Dataset

__all__ = ["audit"]

Progress = Callable[[int, int], None]


def audit(
    dataset: Dataset,
    extractor: Extractor,
    *,
    fraction: float | Fraction | None = None,
    count: int | None = None,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    documents: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Compute a sample of records again and compare, layer by layer, K and V apart.

    Documents are computed one at a time, unpadded, from the token ids, positions and mask that are stored beside them.
    Bits that differ are no fault: other hardware rounds otherwise. What differs by more than the dataset's bounds is.
    Contexts and text are compared first; where they differ, values are compared all the same, to show by how much.

    Stored ids prove nothing about the text they came from: with ``documents`` that is looked at too.

    Parameters
    ----------
    dataset
        It stores ``token_ids``. Records are verified as they are read.
    extractor
        With the model that is thought to have made the dataset, and its layers.
    fraction, count, seed
        Which records: a function of the dataset's id and of these, and a larger sample holds a smaller one. 0.01 of
        them, and at least one, where neither is given.
    tokenizer
        Compared with what the dataset records of its own.
    documents
        Documents file; its text is tokenised again, for the sampled records, and compared with their ids.
    progress
        Called with (bytes compared, bytes of the sample in all).

    Returns
    -------
    AuditReport
        Findings make it not ``ok``. A record that cannot be computed again is one.

    Raises
    ------
    LookupFailedError
        E082 where the dataset stores no token ids.
    UsageError
        E081.
    InputError
        E300, E305, E306, E309 of the documents.
    FormatError, DamageError
        E044 and whatever is wrong with covered files. Damage to a record is a finding.
    """
    require_inputs(dataset)
    from kvformat.extract.recomputation import Recomputation

    chosen = sample_records(dataset.id, len(dataset), fraction=fraction, count=count, seed=seed)
    numbers = chosen.tolist()
    known = dataset.context.model is not None and extractor.context.model is not None
    findings = Findings(dataset.location)
    for one in context_differences(dataset, extractor):
        findings.add("E083", f"the model is another one: {one}")
    notes = [] if known else ["a context is unknown, which equals nothing: only the values tell"]
    notes += _compare_text(dataset, tokenizer, findings)
    if documents is not None:
        joined = check_documents(dataset, documents, tokenizer=tokenizer, records=numbers, limit=len(numbers))
        for finding in joined.findings:
            findings.add("E312", finding.message, record=finding.name)
        notes += joined.notes
    work = Recomputation(dataset, extractor, tokenizer, findings)
    dims = map(tuple, dataset.index.dims_of(chosen).tolist())
    done, total = 0, sum(dataset.layout.place(one).nbytes for one in dims)
    for number in numbers:
        record = dataset[number]
        work.look_at(record)
        done += record.nbytes
        if progress is not None:
            progress(done, total)
    return AuditReport(
        ok=findings.count == 0,
        id=dataset.id,
        seed=seed,
        records=len(dataset),
        sampled=len(numbers),
        computed=work.computed,
        equal=work.equal,
        beyond=work.beyond,
        tokens=work.tokens,
        context_known=known,
        components=tuple(tally.deviation() for tally in work.tallies),
        findings=findings.told(),
        num_findings=findings.count,
        notes=tuple(notes),
    )


def _compare_text(dataset: Dataset, tokenizer: PreTrainedTokenizerBase | None, findings: Findings) -> list[str]:
    """What the dataset records of its tokenizer against the one given; a note where that cannot be done."""
    if dataset.text.tokenizer is None:
        return ["the documents came as token ids: there is no tokenizer to compare"]
    if tokenizer is None:
        return ["no tokenizer was given: that of the dataset is not compared"]
    try:
        found = text_differences(dataset.text, text_of(tokenizer, dataset.text))
    except InputError as error:
        found = [error.message]
    for one in found:
        findings.add("E312", f"text becomes other token ids: {one}")
    return []
