"""``kvformat documents``: a source of documents, tokenised once, as a documents file."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvformat.cli import model_options, options, output, source_options
from kvformat.cli.counts import documents_facts, shown_facts, told
from kvformat.cli.progress import meter
from kvformat.cli.quiet import quiet_libraries
from kvformat.errors import make_error

__all__ = ["documents"]


def documents(
    *,
    documents: source_options.Source,
    model: options.Model,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="Documents file to write: NAME.kvdocs.")],
    revision: options.Revision = None,
    images: model_options.Images = False,
    column: source_options.Columns = None,
    truncate: options.Truncate = None,
    skip_too_long: source_options.SkipTooLong = False,
    add_generation_prompt: options.AddGenerationPrompt = False,
    special_tokens: options.SpecialTokens = True,
    as_json: options.AsJson = False,
) -> None:
    """Tokenise documents once, into a documents file.

    For what reads them several times: plans, and checks of a trainer's documents. Reads tokenizer and configuration
    of the model, no weights. Documents of equal token ids become one, with several names. An equal file that is there
    already is no error; another one is never overwritten.
    """
    columns = source_options.parse_columns(column)
    quiet_libraries(terminal=output.is_terminal(sys.stderr))
    from kvformat.extract.documents import write_documents
    from kvformat.extract.documents.opening import SUFFIX, check_source, is_documents_file
    from kvformat.extract.options import ModelOptions, SourceOptions
    from kvformat.extract.places import local_place
    from kvformat.extract.reasoner import describe_reasoner, load_tokeniser
    from kvformat.write.prepared import check_place

    if not is_documents_file(out) or is_documents_file(documents):
        raise make_error("E081", f"--out must be the NAME{SUFFIX} of a documents file, and --documents a source")
    place = local_place(out, what="a documents file")
    check_place(place.absolute().parent, what="a documents file")
    check_source(documents)
    reasoner = ModelOptions(model=model, revision=revision, images=images)
    source = SourceOptions(
        documents=documents,
        truncate=truncate,
        add_generation_prompt=add_generation_prompt,
        special_tokens=special_tokens,
    )
    tokeniser = load_tokeniser(describe_reasoner(reasoner), reasoner, source)
    with meter() as shown:
        found = write_documents(
            documents,
            place,
            tokeniser,
            columns=columns,
            too_long="skip" if skip_too_long else "refuse",
            progress=told(shown),
        )
    facts = documents_facts(found)
    if as_json:
        output.emit_json({"ok": True, **facts})
    else:
        from kvformat.cli.tables import facts as table

        output.render(table(shown_facts(facts)))
