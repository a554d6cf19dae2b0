"""The buffers of a pipeline stage are classified by their role, not by their size."""

from __future__ import annotations

from tightfit.cost.pipeline_stage import StageInput, sections_of, stage_program
from tightfit.cost.recorded_step import BatchLinear, Buffer, Segment, Timeline, replay

SIZE, HIDDEN = BatchLinear(100.0), BatchLinear(7.0)  # all but the hidden states are equally large


def program(blocks: int) -> tuple[Segment, ...]:
    """A program whose blocks between the first two and the last were not recorded: the second
    stands for them. Each keeps a copy of its weight. The head's part of a tied gradient waits for
    the embedding's."""
    kinds = [0, *([1] * (blocks - 2)), 2]
    copies = [Buffer(SIZE, "activations", "cast") for _ in range(3)]
    outputs = [Buffer(HIDDEN, "temporaries", "add") for _ in range(3)]
    backwards = [Buffer(HIDDEN, "temporaries", "mm") for _ in range(3)]
    weights = [Buffer(SIZE, "gradients", "mm", f"blocks.{kind}") for kind in range(3)]
    embedded = Buffer(HIDDEN, "temporaries", "embedding")
    of_head, of_embedding = (Buffer(SIZE, "temporaries", maker, "tied") for maker in ("mm", "embedding_backward"))
    tied = Buffer(SIZE, "gradients", "add", "tied", terms=(of_head, of_embedding))
    below, above = [embedded, outputs[0], outputs[1]], [backwards[1], backwards[2], None]
    head = Buffer(HIDDEN, "temporaries", "mm")
    forward, backward = [], []
    for kind in range(3):
        came, gradient = below[kind], above[kind] or head
        kept = frozenset((copies[kind], came))
        forward.append(Timeline(((copies[kind], 1), (outputs[kind], 1)), inputs=(came,), saved=kept))
        made = ((weights[kind], 1), (weights[kind], 0), (backwards[kind], 1))
        gone = ((copies[kind], -1), (came, -1), (gradient, -1))
        backward.append(Timeline((*made, *gone)))
    last = ((of_head, 1), (head, 1), (outputs[2], -1))
    first = ((of_embedding, 1), (tied, 1), (of_embedding, -1), (of_head, -1), (tied, 0), (backwards[0], -1))
    return (
        Segment("start", "forward", Timeline(((embedded, 1),))),
        *(Segment("block", "forward", forward[kind], number) for number, kind in enumerate(kinds)),
        Segment("between", "forward", Timeline(saved=frozenset((outputs[2],)))),
        Segment("between", "backward", Timeline(last)),
        *(Segment("block", "backward", backward[kinds[n]], n) for n in reversed(range(blocks))),
        Segment("start", "backward", Timeline(first)),
    )


def left(segments: tuple[Segment, ...]) -> dict[str, float]:
    rows = {"activations": 0.0, "temporaries": 0.0, "gradients": 0.0}
    for segment in segments:
        net = replay(segment.timeline, 1).at_end
        rows = {row: size + net[row] for row, size in rows.items()}
    return rows


def test_a_stage_keeps_its_own_blocks_and_their_inputs() -> None:
    """Any split, even or not: a stage keeps a copy of a weight for each block, and each block's
    input."""
    blocks = 8
    for pieces in ([range(3), range(3, 8)], [range(2), range(2, 5), range(5, 7), range(7, 8)]):
        sections = sections_of(program(blocks), blocks, False)
        for piece in pieces:
            comes = StageInput(saved=HIDDEN) if piece.start else StageInput()
            found = stage_program(sections, piece, comes, BatchLinear() if piece.stop == blocks else HIDDEN)
            last = piece.stop == blocks
            kept = left(found.forward)
            assert kept["activations"] + kept["temporaries"] == len(piece) * 107 + (7 if last else 0), piece
            ends = last or piece.start == 0  # each of which has the tied weight
            assert left((*found.forward, *found.backward)) == {
                "activations": 0,
                "temporaries": 0,
                "gradients": 100 * (len(piece) + ends),
            }, piece


def test_split_backward_keeps_operands_for_weight_gradients() -> None:
    """A split backward computes the weight gradients of linear layers later, from operands it keeps until then."""
    operand, gradient = Buffer(SIZE, "activations", "norm"), Buffer(HIDDEN, "temporaries", "mm")
    weight = Buffer(SIZE, "gradients", "aten.mm", "blocks.0", operands=(operand, gradient))
    output, bias = Buffer(HIDDEN, "temporaries", "mm"), Buffer(BatchLinear(3.0), "gradients", "sum", "bias")
    forward = Timeline(((operand, 1), (output, 1)), saved=frozenset((operand,)))
    backward = Timeline(((weight, 1), (weight, 0), (bias, 1), (bias, 0), (operand, -1), (gradient, -1)))
    training = (
        Segment("block", "forward", forward, 0),
        Segment("between", "forward", Timeline(saved=frozenset((output,)))),
        Segment("between", "backward", Timeline(((gradient, 1), (output, -1)))),
        Segment("block", "backward", backward, 0),
    )
    whole = stage_program(sections_of(training, 1, False), range(1), StageInput(), BatchLinear())
    split = stage_program(sections_of(training, 1, True), range(1), StageInput(), BatchLinear())
    assert whole.weights == ()
    assert left(whole.segments) == left(split.segments) == {"activations": 0, "temporaries": 0, "gradients": 103}
    waits = left((*split.forward, *split.backward))
    assert waits == {"activations": 100, "temporaries": 7, "gradients": 3}
