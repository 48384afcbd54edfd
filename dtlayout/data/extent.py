"""Lines for people about the data that a run reads: epochs, padding, documents cut, held-out samples left out."""

from collections.abc import Iterable

from dtlayout.base.formatting import plural
from dtlayout.data.samples import SampledSource, Samples


def describe_filling(sources: Iterable[SampledSource]) -> list[str]:
    """A line for each source whose documents stay whole: padding, and documents that are cut all the same."""
    return [
        f"{source.name}, {source.samples}: {source.division.padding_share:.1%} of the samples is padding; "
        + _describe_cut(source.division.num_cut, source.tokens.num_documents)
        for source in sources
        if source.samples != "packed"
    ]


def _describe_cut(num_cut: int, num_documents: int) -> str:
    if not num_cut:
        return "no document is cut"
    share = num_cut / num_documents
    said = f"{share:.1%}" if share >= 0.001 else "less than 0.1%"
    return f"{num_cut:,} of {plural(num_documents, 'document', ',')} cut, {said}: longer than a sample"


def describe_training(samples: Samples, num_steps: int) -> list[str]:
    """A line about how often a run of `num_steps` reads each source, then lines about padding and documents cut.

    Steps before a resume count with the batches that they had. Each of several sources is read by its share.
    """
    num_read = samples.seen.count_samples(max(num_steps, samples.seen.step), samples.sizes.global_batch)
    pairs = zip(samples.sources, samples.shares, strict=True)
    epochs = [
        f"{num_read * share / source.num_samples:.3g} epochs of {plural(source.num_samples, 'sample', ',')}"
        + f" of {source.name}" * (len(samples.sources) > 1)
        for source, share in pairs
    ]
    line = f"{plural(num_steps, 'step', ',')} read {plural(num_read, 'sample', ',')}: {', '.join(epochs)}"
    return [line, *describe_filling(samples.sources)]


def describe_held_out(samples: Samples, num_batches: int) -> list[str]:
    """A line about how many samples of [validation] are measured and why not all, then those of `describe_filling`.

    `num_batches` is `validation.batches`; no more batches are measured than the samples fill.
    """
    size, measured = samples.sizes.global_batch, min(num_batches, samples.num_batches)
    line = f"validation measures {plural(measured * size, 'sample', ',')} of {samples.num_samples:,}"
    tail = samples.num_samples - samples.num_batches * size
    if measured < samples.num_batches:
        line += f", {plural(measured, 'batch')} of {samples.num_batches:,}: validation.batches={num_batches}"
    elif tail:
        line += f"; the other {tail:,} do not fill a batch of {size:,}"
    return [line, *describe_filling(samples.sources)]
