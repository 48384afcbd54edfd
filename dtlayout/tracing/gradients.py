"""Gradients of a block: which of its tensors the result depends on through numbers that can be differentiated.

What is computed to choose something, such as the tokens that attention reads, leaves as whole numbers or flags. Nothing
before them has a gradient, whether their code says so or not.
"""

from dtlayout.tracing.record import BlockRecord


def find_differentiated(record: BlockRecord) -> frozenset[int]:
    """Tensors of a block's calls, parameters among them, that what it returns has a gradient by.

    Calls are followed backward. A call that writes into a part of a tensor makes all that lies in the same memory.
    Attention adds its mask to scores, so numbers of a mask have a gradient.
    """
    places, found = record.places, set[int]()
    wanted = {places[each].memory for each in record.results if each not in record.whole_numbers}
    for call in reversed(record.calls):
        if any(places[each].memory in wanted for each in call.makes):
            masks: list[int] = [
                asked["adds"] for each in call.makes if "adds" in (asked := record.attention.get(each, {}))
            ]
            around = (*call.reads, *call.makes, *filter(places.__contains__, masks))
            read = [each for each in around if each not in record.whole_numbers]
            found.update(read)
            wanted.update(places[each].memory for each in read)
    return frozenset(found)
