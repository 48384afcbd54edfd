"""How much of its data a run reads, in lines for people: epochs, what is cut, what is held out and never measured."""

from collections.abc import Iterable

from dtlayout.base.formatting import plural
from dtlayout.data.samples import SampledSource, Samples


def describe_cut_documents(cuts: Iterable[SampledSource]) -> list[str]:
    """A note for each source of which documents are longer than a sample."""
    return [
        f"note: {plural(cut.num_cut, 'document', ',')} of {cut.source} cut: longer than a sample"
        for cut in cuts
        if cut.num_cut
    ]


def describe_training(samples: Samples, num_steps: int) -> list[str]:
    """How often a run of `num_steps` reads each source, and what is cut in there; a line with "note" needs a look.

    Steps before a resume count with the batches that they had. Of several sources each is read by its share.
    """
    num_read = samples.seen.count_samples(max(num_steps, samples.seen.step), samples.sizes.global_batch)
    pairs = zip(samples.cuts, samples.shares, strict=True)
    epochs = [
        f"{num_read * share / cut.num_samples:.3g} epochs of {plural(cut.num_samples, 'sample', ',')}"
        + f" of {cut.source}" * (len(samples.cuts) > 1)
        for cut, share in pairs
    ]
    line = f"{plural(num_steps, 'step', ',')} read {plural(num_read, 'sample', ',')}: {', '.join(epochs)}"
    return [line, *describe_cut_documents(samples.cuts)]


def describe_held_out(samples: Samples, num_batches: int) -> list[str]:
    """A line that says how many samples of [validation] are measured and why not all, then notes on documents cut.

    `num_batches` is `validation.batches`; no more batches are measured than the samples fill.
    """
    size, measured = samples.sizes.global_batch, min(num_batches, samples.num_batches)
    line = f"validation measures {plural(measured * size, 'sample', ',')} of {samples.num_samples:,}"
    tail = samples.num_samples - samples.num_batches * size
    if measured < samples.num_batches:
        line += f", {plural(measured, 'batch')} of {samples.num_batches:,}: validation.batches={num_batches}"
    elif tail:
        line += f"; the other {tail:,} do not fill a batch of {size:,}"
    return [line, *describe_cut_documents(samples.cuts)]
