"""Lines for people about the data that a run reads: epochs, padding, documents cut, held-out samples left out."""

from collections.abc import Iterable, Iterator

from dtlayout.base.formatting import plural
from dtlayout.base.source_names import STDLIB
from dtlayout.data.samples import SampledSource, Samples


def describe_sources(sources: Iterable[SampledSource]) -> list[str]:
    """Lines for each source: padding and cut documents; what is left out or not learnt."""
    return [line for source in sources for line in _describe_source(source)]


def _describe_source(source: SampledSource) -> Iterator[str]:
    tokens, division = source.tokens, source.division
    padding, why = f"{division.padding_share:.1%} of the samples is padding", "longer than a sample"
    if source.samples == "packed":
        padding, why = "no padding", "a sample ends inside"
    if source.samples != "packed" or tokens.num_documents > 1:  # a text of one document is there to be cut
        cut = _describe_cut(division.num_cut, tokens.num_documents, why)
        yield f"{source.name}, {source.samples}: {padding}; {cut}"
    if source.name != STDLIB and tokens.max_tokens and tokens.num_tokens == tokens.max_tokens:
        first = plural(tokens.max_tokens, "token", ",")
        yield f"note: data.max_tokens takes the first {first} of {source.name} alone; 0 takes all"
    if tokens.num_bad_rows:
        yield (
            f"note: {plural(tokens.num_bad_rows, 'bad row', ',')} of {source.name} left out; the first: "
            f"{tokens.first_bad_row}"
        )
    if num_without := source.targets.num_samples_without:
        yield (
            f"note: nothing is learnt from {plural(num_without, 'sample', ',')} of {source.name}, which hold no "
            f"target: {source.explain_untaught(source.targets)}"
        )
    if tokens.num_unanswered:
        yield (
            f"note: {plural(tokens.num_unanswered, 'conversation', ',')} of {source.name} without an answer: no "
            f'message there has the role assistant, so nothing of it is learnt; data.loss_on="all" learns whole texts'
        )
    if tokens.num_rewritten:
        yield (
            f"note: {plural(tokens.num_rewritten, 'answer', ',')} of {source.name} not learnt: the chat template "
            f"writes them in another way once messages follow; the last answer of each conversation is learnt"
        )


def _describe_cut(num_cut: int, num_documents: int, why: str) -> str:
    if not num_cut:
        return "no document is cut"
    share = num_cut / num_documents
    said = f"{share:.1%}" if share >= 0.001 else "less than 0.1%"
    return f"{num_cut:,} of {plural(num_documents, 'document', ',')} cut, {said}: {why}"


def describe_training(samples: Samples, num_steps: int) -> list[str]:
    """A line about how often a run of `num_steps` reads each source, then lines about padding and documents cut.

    Steps before a resume count with the batches that they had. Each of several sources is read by its share.
    """
    num_read = samples.count_before(max(num_steps, samples.seen.step))
    pairs = zip(samples.sources, samples.shares, strict=True)
    epochs = [
        f"{num_read * share / source.num_samples:.3g} epochs of {plural(source.num_samples, 'sample', ',')}"
        + f" with {plural(source.targets.number, 'target', ',')}"
        + f" of {source.name}" * (len(samples.sources) > 1)
        for source, share in pairs
    ]
    line = f"{plural(num_steps, 'step', ',')} read {plural(num_read, 'sample', ',')}: {', '.join(epochs)}"
    return [line, *describe_sources(samples.sources)]


def describe_held_out(name: str, samples: Samples, num_batches: int) -> list[str]:
    """A line about how many samples of a set of [validation] are measured, then those of `describe_sources`.

    `name` is empty for `validation.source`. `num_batches` is the limit of global batches; 0 for all.
    """
    num_held_out, size = samples.num_samples, samples.sizes.global_batch
    measured = min(num_batches * size, num_held_out) if num_batches else num_held_out
    line = f"validation{f' {name}' * bool(name)} measures {plural(measured, 'sample', ',')} of {num_held_out:,}"
    if measured < num_held_out:
        line += f", {plural(num_batches, 'batch')} of {samples.num_batches:,}: batches={num_batches}"
    elif num_left_out := sum(source.division.num_left_out for source in samples.sources):
        line += f"; {plural(num_left_out, 'token')} behind the last whole sample left out"
    return [line, *describe_sources(samples.sources)]
