"""Changes of settings of the process; see ``rows.py``."""

from __future__ import annotations

from tests.changes.rows import MISS, Change, Table
from tests.studies import Study

TABLE = Table()
hits, misses, row = TABLE.hits, TABLE.misses, TABLE.row
test_change = TABLE.test

# The state of the process


row(
    MISS,
    "tracking_of_metadata",
    code=("", "import monai; monai.data.set_track_meta(False)"),
    add='mt.Spacingd("image", (3.0, 3.0, 3.0))',
)
row(
    MISS,
    "tracking_of_metadata_on_again",
    code=("import monai; monai.data.set_track_meta(False)", "import monai; monai.data.set_track_meta(True)"),
    add='mt.Spacingd("image", (3.0, 3.0, 3.0))',
)
row(
    MISS,
    "the_default_dtype",
    code=("", "import torch; torch.set_default_dtype(torch.float64)"),
    define="def thirds(d):\n    return {**d, 'thirds': torch.tensor([1 / 3, 2 / 3])}",
    add="mt.Lambda(thirds)",
)
row(
    MISS,
    "small_numbers_set_to_zero",
    code=("", "import torch; assert torch.set_flush_denormal(True)"),
    add='mt.Lambdad("image", lambda x: x * 1e-20 * 1e-20)',
)
# Settings that change after the dataset was made concern the random half alone


def after_the_dataset(name: str, code: str, *transforms: str, define: str = "", index: int = 0) -> None:
    """Registers a row: a setting changes, and an item, read before or not, is what a CacheDataset gives then."""

    def change(s: Study) -> Change:
        s.keeps, s.keep_ids = True, False
        if define:
            s.define(define)
        for transform in transforms:
            s.add(transform)
        yield
        s.code, s.index = code, index

    change.__name__ = name
    (misses if index else hits)(one_process=True, other_item=None)(change)


UNTRACKED = "import monai; monai.data.set_track_meta(False)"
IN_FLOAT64 = "import torch; torch.set_default_dtype(torch.float64)"
SPACING = 'mt.Spacingd("image", (3.0, 3.0, 3.0))'
SHIFT = 'mt.RandShiftIntensityd("image", (0.5, 0.5), prob=1.0)'
THIRDS = "def thirds(d):\n    return {**d, 'thirds': torch.tensor([1 / 3, 2 / 3])}"

after_the_dataset("tracking_off_after_the_dataset", UNTRACKED, SPACING, SHIFT)
after_the_dataset("tracking_off_before_an_item_is_computed", UNTRACKED, SPACING, SHIFT, index=1)
after_the_dataset("tracking_off_before_an_item_that_is_not_random", UNTRACKED, SPACING, index=1)
after_the_dataset(
    "the_default_dtype_before_an_item_is_computed",
    IN_FLOAT64,
    "mt.Lambda(thirds)",
    "lambda d: {**d, 'random': torch.ones(2)}",
    define=THIRDS,
    index=1,
)
after_the_dataset(
    "small_numbers_set_to_zero_before_an_item_is_computed",
    "import torch; assert torch.set_flush_denormal(True)",
    'mt.Lambdad("image", lambda x: x * 1e-20 * 1e-20)',
    index=1,
)
after_the_dataset(
    "a_default_device_before_an_item_is_computed",
    "import torch; torch.set_default_device('meta')",
    "mt.Lambda(thirds)",
    define=THIRDS,
    index=1,
)


row(MISS, "metadata_beside_arrays", code=("", "import monai.config; monai.config.USE_META_DICT = True"))


@misses()
def tracing_by_the_environment(s: Study) -> Change:
    s.add('mt.Flipd("image", 0)')
    yield
    s.environment = {"MONAI_TRACE_TRANSFORM": "0"}


@misses()
def identities_of_transforms_kept(s: Study) -> Change:
    s.add('mt.Flipd("image", 0)')
    s.keep_ids = False
    yield
    s.settings = {"reset_ops_id": False}


@misses()
def identities_of_transforms_reset(s: Study) -> Change:  # with those of another process no Invertd works
    s.add('mt.Flipd("image", 0)')
    s.settings = {"reset_ops_id": False}
    s.keep_ids = False
    yield
    s.settings = {}
    s.keep_ids = True


VERSION = "import monai; monai.__version__ = {!r}"


row(MISS, "another_patch_of_monai", code=(VERSION.format("1.6.1"), VERSION.format("1.6.2")), other_item=False)
row(
    MISS,
    "another_minor_version_of_monai",
    settings=({"options": {"monai_version": "minor"}}, {"options": {"monai_version": "minor"}}),
    code=(VERSION.format("1.6.1"), VERSION.format("1.7.0")),
    other_item=False,
)
row(
    MISS,
    "another_word_on_the_version_of_monai",
    settings=({"options": {"monai_version": "minor"}}, {"options": {"monai_version": "exact"}}),
    other_item=False,
)
