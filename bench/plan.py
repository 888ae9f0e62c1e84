"""What is measured: shapes, sizes, effort, and the bounds of the targets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple


class Shape(NamedTuple):
    """Sets (n, d) are pooled into K slots of width d_out."""

    dim_in: int
    num_slots: int
    dim_out: int

    def __str__(self) -> str:
        return f"({self.dim_in}, {self.num_slots}, {self.dim_out})"


MIDDLE = Shape(64, 32, 64)
WIDE = Shape(256, 32, 256)
NARROW = Shape(5, 16, 64)  # points with a few features, typical of sets larger than memory
SHAPES = (MIDDLE, WIDE, NARROW)
EXTREME_SHAPES = (*SHAPES, Shape(16, 16, 64))  # for max and min


@dataclass(frozen=True)
class Plan:
    """Sizes and effort of a run; the targets refer to the default sizes.

    Attributes:
        lengths: set sizes n for timing peers and encoders.
        attention_lengths: set sizes n for comparing with attention, ascending.
        extreme_length: set size for max and min, small enough for the literal algorithm.
        roofline_bytes: size of the sets for the roofline, larger than the caches.
        product_width: width of the square matrices that measure arithmetic without a compiler.
        rounds: smallest and largest number of rounds.
        budget: seconds after which no further round starts.
        encoder_rounds, encoder_budget: the same for timing every encoder; some are slow.
        warm_up_calls: number of calls of each contender before timing.
        sample_seconds: faster contenders are called several times per round.
        memory_lengths: set sizes n for memory, ascending.
        peer_memory_limit: largest of them for peers.
        encoder_memory_lengths: set sizes n for the memory of every encoder on whole sets.
        fold_lengths: set sizes n for the memory of folds, ascending from one chunk.
        gradient_lengths: set sizes n for training steps, ascending.
        gradient_limit: largest of them at which every kind of step is measured, repeatedly.
        gradient_judged: those at which the time of exact gradients has a target.
        gradient_rounds, gradient_budget: effort for timing training steps.
        disk_length: set size for training from a file.
        state_length: size of the large update for comparing precisions of the state.
        pool_chunks, pool_visits: number of distinct chunks in the stream for rounding errors, and
            number of times that each occurs.
        short_sets: number of sets in the ragged update.
        small_updates: number of updates in a chain of small updates.
        file_rows: number of elements in the files.
        file_small_sets: number of small sets in files, of about ten elements each.
        file_rounds: number of rounds for the files.
        frame_rows: number of elements in the data frames.
        frame_rounds: number of rounds for the data frames.
        groups: number of groups of rows for aggregations of graphs.
        live_sets, live_few: numbers of live sets that are kept, to compare.
        live_rounds: number of rounds for live sets, without the warm-up.
        live_rewrites: number of times that a file of states is rewritten.
        live_batches: for each number of sets that a batch touches, the batches of a round: so many
            that each round pays for a share of what a database puts off.
        live_scale_sets: number of sets kept where the work of one core is measured.
        live_scale_events: number of events of a batch there.
        live_reads: number of reads of one set.
        live_seconds: duration of a measurement of writers, or of the service.
        live_clients: number of clients of the service.
    """

    lengths: tuple[int, ...] = (1_000, 10_000, 100_000)
    attention_lengths: tuple[int, ...] = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
    extreme_length: int = 20_000
    roofline_bytes: int = 256_000_000
    product_width: int = 2_048
    rounds: tuple[int, int] = (5, 11)
    budget: float = 6.0
    encoder_rounds: tuple[int, int] = (3, 7)
    encoder_budget: float = 2.0
    warm_up_calls: int = 3
    sample_seconds: float = 0.02
    memory_lengths: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    peer_memory_limit: int = 1_000_000
    encoder_memory_lengths: tuple[int, ...] = (1_000, 10_000, 100_000)
    fold_lengths: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    gradient_lengths: tuple[int, ...] = (10_000, 100_000, 1_000_000, 10_000_000)
    gradient_limit: int = 1_000_000
    gradient_judged: tuple[int, ...] = (100_000, 1_000_000)
    gradient_rounds: tuple[int, int] = (3, 7)
    gradient_budget: float = 5.0
    disk_length: int = 100_000_000
    state_length: int = 100_000
    pool_chunks: int = 1_000
    pool_visits: int = 100
    short_sets: int = 10_000
    small_updates: int = 600
    file_rows: int = 4_000_000
    file_small_sets: int = 100_000
    file_rounds: int = 3
    frame_rows: int = 1_000_000
    frame_rounds: int = 11
    groups: int = 2_000
    live_sets: int = 1_000_000
    live_few: int = 10_000
    live_rounds: int = 7
    live_rewrites: int = 1
    live_batches: dict[int, int] = field(default_factory=lambda: {10: 25, 1_000: 8})
    live_scale_sets: int = 100_000
    live_scale_events: int = 10_000
    live_reads: int = 1_000
    live_seconds: float = 4.0
    live_clients: int = 32

    @property
    def live_bytes(self) -> int:
        """Return the bytes on disk for each live set, with copies and logs of all contenders."""
        return 16 * LIVE_SLOTS * 8 * (LIVE_WIDTH + 1)

    @property
    def for_encoders(self) -> Plan:
        """Return the same plan with the effort for timing every encoder."""
        return replace(self, rounds=self.encoder_rounds, budget=self.encoder_budget)

    def for_gradients(self, length: int) -> Plan:
        """Return the same plan with the effort for training steps on n elements."""
        if length > self.gradient_limit:  # takes minutes; smaller sets were the warm-up
            return replace(self, rounds=(1, 1), warm_up_calls=0)
        return replace(self, rounds=self.gradient_rounds, budget=self.gradient_budget)


FULL = Plan()
QUICK = Plan(
    lengths=(100, 1_000),
    attention_lengths=(1, 100, 1_000),
    extreme_length=500,
    roofline_bytes=256_000,
    product_width=128,
    rounds=(1, 1),
    budget=0.0,
    encoder_rounds=(1, 1),
    encoder_budget=0.0,
    warm_up_calls=1,
    sample_seconds=0.0,
    memory_lengths=(10_000,),
    peer_memory_limit=10_000,
    encoder_memory_lengths=(100,),
    fold_lengths=(11_000,),
    gradient_lengths=(20_000,),
    gradient_limit=20_000,
    gradient_judged=(20_000,),
    gradient_rounds=(1, 1),
    gradient_budget=0.0,
    disk_length=100_000,
    state_length=10_000,
    pool_chunks=10,
    pool_visits=10,
    short_sets=200,
    small_updates=60,
    file_rows=4_000,
    file_small_sets=100,
    file_rounds=1,
    frame_rows=4_000,
    frame_rounds=1,
    groups=20,
    live_sets=400,
    live_few=100,
    live_rounds=1,
    live_batches={10: 2, 50: 2},
    live_scale_sets=100,
    live_scale_events=100,
    live_reads=20,
    live_seconds=0.2,
    live_clients=4,
)


def power(number: int) -> str:
    """Format a round number in short form.

    >>> power(20_000), power(10)
    ('2e4', '10')
    """
    return f"{number:.0e}".replace("e+0", "e") if number >= 1_000 else str(number)


FLOAT_BYTES = 4
CHUNK = 1_000  # elements per update of a stream
FOLD_CHUNK = 10_000  # elements per chunk of a fold
GRADIENT_CHUNK = 2**14  # elements per chunk of a training step
GRAPH_LIMIT = 4_000.0  # MB above the input; autograd on whole sets is tried up to this limit
LONGEST_SHORT_SET = 20
FILES, FILE_SETS = 40, 2_000  # number of files and sets in the benchmark on files
FILES_MEMORY = 2_000_000_000  # bytes, the default of `setfold encode`
ROWS_PER_GROUP = 100  # of aggregations of graphs, on average
SMALL_LENGTHS = (1, 10, 100)  # elements per small update
LIVE_WIDTH = 16  # numbers of an element of live sets
LIVE_SLOTS, LIVE_SCALE_SLOTS = 14, 8  # states of 1.9 KB, and those of docs/live_scale.md
LIVE_WRITERS = 4
SMALL_TRAINED, SMALL_ENCODED = 100, 1_000  # elements of one small set


@dataclass(frozen=True)
class Bounds:
    """Bounds of the targets; speeds are multiples of a peer's speed."""

    forward: dict[Shape, float] = field(default_factory=lambda: _by_shape(4.2, 7.5, 13.0))
    training: dict[Shape, float] = field(default_factory=lambda: _by_shape(4.5, 7.5, 13.0))
    attention: dict[Shape, float] = field(default_factory=lambda: _by_shape(3.5, 7.0, 10.0))
    attention_anywhere: float = 1.0
    memory_megabytes: float = 10.0
    memory_growth_megabytes: float = 2.0
    extreme_forward: dict[Shape, float] = field(
        default_factory=lambda: _by_shape(8.0, 4.0, 15.0, 15.0)
    )
    extreme_training: dict[Shape, float] = field(
        default_factory=lambda: _by_shape(8.0, 10.0, 20.0, 20.0)
    )
    state_cost: float = 1.1
    relative_error: float = 1e-7
    ragged: float = 5.0
    ragged_kernel: float = 5.0
    small_update: float = 2.0
    small_forward: float = 1.2
    small_training: float = 1.0
    softmax: float = 1.2
    library_peers: float = 1.0
    many_slots: float = 2.0
    exact_on_features: float = 1.6
    exact_alone: float = 1.0
    process_megabytes: float = 1_000.0
    files_speed: float = 0.55  # of reading alone
    files_speed_v4: float = 0.6  # with AVX-512
    files_cores: float = 1.8
    files_small_sets: float = 3.0
    files_linear: float = 2.2
    files_flat: float = 1.1
    frames: float = 1.5
    groups: float = 1.0
    groups_memory: float = 1.5
    live_raw: float = 0.5  # of the throughput of raw upserts
    live_kept: float = 1.5
    live_read_ms: float = 1.0
    live_http_ms: float = 5.0
    live_writers: float = 1.5
    live_service: float = 2_000.0
    live_growth_megabytes: float = 50.0


def _by_shape(*bounds: float) -> dict[Shape, float]:
    return dict(zip(EXTREME_SHAPES[: len(bounds)], bounds, strict=True))


BOUNDS = Bounds()
