"""What a meta-iteration must compute and move: operations and bytes, counted from the shapes alone.

**Operations.** A convolution and its two derivatives (towards the images, towards the filters) are bilinear maps of the
same cost, 2 x 9 x inputs x outputs for each position: one unit. A head is the same with one position and one tap.

    inner step    forward 1, its gradient 2, and the outer derivative of these three maps 2 each: 9 units
    query         forward 1, and the outer derivative 2: 3 units

The first layer's images need no derivative: there an inner step is 4 units (forward 1, gradient 1, one derivative of
each) and a query 2. All that is not a convolution or the head is left out: a few per cent of the operations.

**Bytes.** One program for each map, and one for batch norm, pooling and activation together (and for its first and its
second derivative): each reads what it needs once and writes its result once. Two maps whose results are added write
once. Batch norm needs statistics of the whole batch, so the convolution's result is written and read again.
`a` are a layer's inputs, `z` its convolution's results, `p` what pooling leaves of them (the next layer's `a`):

                                            reads                      writes
    forward      convolution                a                          z
                 norm, pool, activation     z                          p
    gradient     of norm, pool, activation  z, p'                      z'
                 towards filters            a, z'
                 towards images             z'                         a'
    outer        of towards images          va', and z', va'           vz'  (with the next)
                 of towards filters         a, z'
                 of the gradient of norm    z, p', vz'                 vp', vz
                 of norm, pool, activation  z, vp, vz                  vz
                 of the convolution         a, vz, and vz              va

Weights and their gradients stay out (below 1 %), and caches are taken to hold nothing from one program to the next. On
a GPU with large images that is nearly so; on a CPU with small ones the true traffic to memory is lower.
"""

from __future__ import annotations

from typing import NamedTuple

from gradshare.bench.cases import Case, as_pytorch_has_it


class Layer(NamedTuple):
    """One layer for one image: values in, values of the convolution, values after pooling, operations of one map."""

    a: int
    z: int
    p: int
    unit: int
    first: bool


class Uses(NamedTuple):
    """How often a, z and p cross the memory bus, reads and writes together."""

    a: int
    z: int
    p: int


INNER_UNITS, INNER_UNITS_FIRST = 9, 4
QUERY_UNITS, QUERY_UNITS_FIRST = 3, 2
# The table above, summed. The first layer has neither `towards images` nor its derivatives; the next row writes vz'.
INNER_USES, INNER_USES_FIRST = Uses(a=8, z=17, p=5), Uses(a=4, z=13, p=5)
QUERY_USES, QUERY_USES_FIRST = Uses(a=3, z=6, p=2), Uses(a=2, z=5, p=2)


def layers(case: Case) -> list[Layer]:
    """The four convolutions, and the head as a fifth layer that nothing follows."""
    channels, height, width = case.image
    found = []
    for number in range(4):
        positions, pooled = height * width, (height // 2) * (width // 2)
        found.append(
            Layer(
                channels * positions,
                case.filters * positions,
                case.filters * pooled,
                2 * 9 * channels * case.filters * positions,
                first=number == 0,
            )
        )
        channels, height, width = case.filters, height // 2, width // 2
    features = channels * height * width
    return [*found, Layer(features, case.ways, 0, 2 * features * case.ways, first=False)]


def support_images(case: Case) -> int:
    """Images that inner steps see, one counted again in each step."""
    return case.tasks * case.ways * case.shots * case.steps


def query_images(case: Case) -> int:
    """Query images, counted for each query loss: MAML++, as it is timed, has one after every inner step."""
    losses = case.steps if case.method == "mamlpp" else 1
    return case.tasks * case.ways * case.queries * losses


def operations(case: Case) -> int:
    """Floating-point operations of a meta-iteration; a multiplication and an addition are two."""
    inner = sum(layer.unit * (INNER_UNITS_FIRST if layer.first else INNER_UNITS) for layer in layers(case))
    query = sum(layer.unit * (QUERY_UNITS_FIRST if layer.first else QUERY_UNITS) for layer in layers(case))
    return support_images(case) * inner + query_images(case) * query


def bytes_moved(case: Case) -> int:
    """Bytes that cross the memory bus in a meta-iteration, by the table above."""
    inner = sum(_values(layer, INNER_USES_FIRST if layer.first else INNER_USES) for layer in layers(case))
    query = sum(_values(layer, QUERY_USES_FIRST if layer.first else QUERY_USES) for layer in layers(case))
    return (support_images(case) * inner + query_images(case) * query) * (2 if case.precision == "bf16" else 4)


def _values(layer: Layer, uses: Uses) -> int:
    return layer.a * uses.a + layer.z * uses.z + layer.p * uses.p


class Ceiling(NamedTuple):
    """The limits of a machine in one precision."""

    bandwidth: float  # bytes a second, read and written
    rate: float  # operations a second

    def floor(self, case: Case) -> float:
        """Seconds under which a meta-iteration cannot stay: all operations, or all bytes, whichever takes longer."""
        return max(operations(case) / self.rate, bytes_moved(case) / self.bandwidth)


def ceiling_of(case: Case, measured: dict[str, Ceiling]) -> Ceiling | None:
    """The limits that a case is held against."""
    return measured.get(as_pytorch_has_it(case.device, case.precision))
