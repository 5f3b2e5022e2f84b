"""Why a key has no record: which record is the nearest, and how the differences are described."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.folder.explain import description_differences, nearest, source_differences
from monai_gds.folder.index import Index, IndexEntry
from monai_gds.keys.hashing import hash_transforms

CT = "/data/ct_3.nii.gz"
SEG = "/data/seg_3.nii.gz"
SOURCES = {CT: (100, "aa" * 16), SEG: (10, "bb" * 16)}

PIPELINE = {
    "transforms[0] LoadImaged.keys": "('image', 'label')",
    "transforms[1] Spacingd.keys": "('image', 'label')",
    "transforms[1] Spacingd.pixdim": "1.5",
    "transforms[2] ScaleIntensityd.minv": "0.0",
    "state.track_meta": "False",
    "lazy": "False",
}


def changed(description: dict[str, str], **texts: str) -> dict[str, str]:
    """The description with other texts for paths that end with these names."""
    return {
        path: next((new for name, new in texts.items() if path.endswith(name)), text)
        for path, text in description.items()
    }


def moved(description: dict[str, str], begin: int, by: int) -> dict[str, str]:
    """The description with its transforms from ``begin`` on at other places."""
    for place in range(begin, 9)[:: -by // abs(by)]:
        description = {
            k.replace(f"transforms[{place}]", f"transforms[{place + by}]"): v for k, v in description.items()
        }
    return description


def step(place: int, name: str, **attributes: str) -> dict[str, str]:
    return {f"transforms[{place}] {name}.{attribute}": text for attribute, text in attributes.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Descriptions


def test_equal_descriptions_do_not_differ() -> None:
    assert description_differences(PIPELINE, dict(reversed(PIPELINE.items()))) == []


def test_attributes_and_state() -> None:
    now = changed(PIPELINE, pixdim="1.0", track_meta="True")
    assert description_differences(PIPELINE, now) == ["Spacingd.pixdim 1.5 → 1.0", "track_meta False → True"]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_an_inserted_transform_is_one_difference(place: int) -> None:
    now = moved(PIPELINE, place, 1) | step(place, "Orientationd", axcodes="RAS", keys="image")
    assert description_differences(PIPELINE, now) == [f"Orientationd inserted at transforms[{place}]"]
    assert description_differences(now, PIPELINE) == [f"Orientationd removed from transforms[{place}]"]


def test_a_transform_in_place_of_another() -> None:
    now = {k.replace("Spacingd", "Resized"): v for k, v in PIPELINE.items()}
    assert set(description_differences(PIPELINE, now)) == {
        "Spacingd removed from transforms[1]",
        "Resized inserted at transforms[1]",
    }


def test_the_place_of_transforms_with_the_same_name_is_given() -> None:
    before = PIPELINE | step(3, "ScaleIntensityd", minv="5.0")
    now = PIPELINE | step(3, "ScaleIntensityd", minv="6.0")
    assert description_differences(before, now) == ["transforms[3] ScaleIntensityd.minv 5.0 → 6.0"]


def test_of_equal_transforms_the_inserted_one_is_found() -> None:
    """Paired from the front, both of them would seem to have changed."""
    before = step(0, "Scale", a="1") | step(1, "Scale", a="2")
    now = step(0, "Scale", a="0") | step(1, "Scale", a="1") | step(2, "Scale", a="2")
    assert description_differences(before, now) == ["Scale inserted at transforms[0]"]


def test_a_changed_order_is_described() -> None:
    before = step(0, "A", x="1") | step(1, "B", x="1")
    now = step(0, "B", x="1") | step(1, "A", x="1")
    found = description_differences(before, now)
    assert len(found) == 2
    assert {text.split()[1] for text in found} == {"removed", "inserted"}


def test_attributes_that_only_one_has() -> None:
    now = PIPELINE | step(1, "Spacingd", lazy="True")
    assert description_differences(PIPELINE, now) == ["Spacingd.lazy not there → True"]
    assert description_differences(now, PIPELINE) == ["Spacingd.lazy True → not there"]


def test_a_transform_without_attributes_and_a_lambda() -> None:
    before, now = (
        {"transforms[0] EnsureTyped": "aa", "transforms[1] <lambda>": "code 1"},
        {"transforms[0] EnsureTyped": "aa"},
    )
    assert description_differences(before, now) == ["<lambda> removed from transforms[1]"]
    assert description_differences(before, before | {"transforms[1] <lambda>": "code 2"}) == [
        "<lambda> code 1 → code 2"
    ]


#: Pipelines before and after an edit of their code.
EDITED = """
import monai.transforms as mt

def helper(x):
    return x * {factor}

def scale(x):
    return helper(x)

class Own(mt.Transform):
    def __call__(self, data):
        return data * {factor}

found = [mt.Lambdad("a", lambda x: x * {factor}), mt.Lambdad("a", scale), Own(), mt.Lambdad("a", lambda x: x {sign} 2)]
"""


@pytest.mark.parametrize(
    ("which", "told"),
    [
        (0, "Lambdad.func[0] (<lambda>)'s constants[1] 2 → 3"),
        (1, "Lambdad.func[0] (scale)'s global helper (helper)'s constants[1] 2 → 3"),
        (2, "class training.Own['__call__'] (Own.__call__)'s constants[1] 2 → 3"),
        (3, "Lambdad.func[0] (<lambda>) code … → code …"),
    ],
)
def test_an_edit_of_code_is_described_once(which: int, told: str) -> None:
    descriptions = []
    for edited in ({"factor": 2, "sign": "*"}, {"factor": 3, "sign": "+"}):
        module: dict[str, Any] = {"__name__": "training"}
        exec(EDITED.format(**edited), module)
        descriptions.append(hash_transforms([module["found"][which]]).description)
    (found,) = description_differences(*descriptions)
    assert re.sub(r"code \w+", "code …", found) == told


def test_an_edit_of_one_of_two_classes_of_one_name_is_described() -> None:
    descriptions = []
    for factor in (2, 3):
        found = []
        for name, by in (("first", factor), ("second", 1)):
            module: dict[str, Any] = {"__name__": name}
            exec(EDITED.format(factor=by, sign="*"), module)
            found.append(module["Own"]())
        descriptions += [hash_transforms(order).description for order in (found, found[::-1])]
    for before, now in (descriptions[::2], descriptions[1::2]):
        assert description_differences(before, now) == [
            "class first.Own['__call__'] (Own.__call__)'s constants[1] 2 → 3"
        ]


texts = st.sampled_from("12")
steps = st.lists(
    st.tuples(st.sampled_from("AB"), st.dictionaries(st.sampled_from("xy"), texts, min_size=1)), max_size=4
)
others = st.dictionaries(st.text(max_size=8), texts, max_size=3)


@st.composite
def descriptions(draw: st.DrawFn) -> dict[str, str]:
    """Transforms at places without a gap, and anything else."""
    found = draw(others)
    for place, (name, attributes) in enumerate(draw(steps)):
        found |= step(place, name, **attributes)
    return found


@given(descriptions(), descriptions())
def test_any_two_descriptions(before: dict[str, str], now: dict[str, str]) -> None:
    found = description_differences(before, now)
    assert (found == []) == (before == now)
    assert (description_differences(now, before) == []) == (before == now)


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def test_sources() -> None:
    now = {CT: (120, "cc" * 16), SEG: (10, "dd" * 16)}
    assert source_differences(SOURCES, now) == ["ct_3.nii.gz changed (size 100 → 120)", "seg_3.nii.gz content changed"]
    assert source_differences(SOURCES, {CT: SOURCES[CT]}) == ["seg_3.nii.gz is no longer a source"]
    assert source_differences({CT: SOURCES[CT]}, SOURCES) == ["seg_3.nii.gz is a new source"]
    assert source_differences(SOURCES, dict(SOURCES)) == []


def test_sources_with_the_same_last_part_are_shown_by_their_paths() -> None:
    before = {"/d/images/1.nii": (1, "a"), "/d/labels/1.nii": (1, "a")}
    now = before | {"/d/labels/1.nii": (2, "a")}
    assert source_differences(before, now) == ["/d/labels/1.nii changed (size 1 → 2)"]


# ---------------------------------------------------------------------------------------------------------------------
# The nearest record


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """An index that knows two pipelines."""
    found = Index(tmp_path)
    found.describe_pipeline("aaaa0000", PIPELINE)
    found.describe_pipeline("bbbb0000", changed(PIPELINE, pixdim="2.0", minv="-1.0"))
    return found


def add(index: Index, n: int, there: bool = True, **more: Any) -> IndexEntry:
    facts = {"item": "item", "pipeline": "aaaa0000", "nbytes": 1, "mtime_ns": n, "tensors": (), "sources": SOURCES}
    entry = IndexEntry(f"{n:032x}", **{**facts, **more})
    index.note_records([entry])
    if there:
        Path(index.directory, entry.name).touch()
    return entry


WANTED = ("item", "cccc0000", SOURCES, changed(PIPELINE, pixdim="1.0"))


def test_nothing_is_near(index: Index) -> None:
    add(index, 1, item="other", sources={"/other/x.nii": (1, "a")})
    found = nearest(index, *WANTED)
    assert found.entry is None
    assert found.differences == ["no record here has this item or one of its source files"]


def test_the_same_item_of_another_pipeline(index: Index) -> None:
    entry = add(index, 1)
    assert nearest(index, *WANTED).entry == entry
    assert nearest(index, *WANTED).differences == ["Spacingd.pixdim 1.5 → 1.0"]


def test_the_same_item_of_other_sources(index: Index) -> None:
    entry = add(index, 1, pipeline="cccc0000", sources=SOURCES | {CT: (90, "x")})
    assert nearest(index, *WANTED).entry == entry
    assert nearest(index, *WANTED).differences == ["ct_3.nii.gz changed (size 90 → 100)"]


def test_the_one_with_the_fewest_differences_is_the_nearest_and_then_the_newest(index: Index) -> None:
    add(index, 9, pipeline="bbbb0000")
    nearer, newer = add(index, 1), add(index, 2)
    add(index, 8, sources=SOURCES | {CT: (90, "x")})
    assert nearest(index, *WANTED).entry == newer
    assert nearer.mtime_ns < newer.mtime_ns


def test_a_record_of_the_item_is_nearer_than_one_of_its_sources(index: Index) -> None:
    entry = add(index, 1, pipeline="bbbb0000", sources={})
    add(index, 2, item="other", pipeline="cccc0000")
    assert nearest(index, *WANTED).entry == entry


def test_another_item_of_the_same_sources(index: Index) -> None:
    entry = add(index, 1, item="other", pipeline="cccc0000", sources=SOURCES | {SEG: (11, "x")})
    found = nearest(index, *WANTED)
    assert found.entry == entry
    assert found.differences == [
        "an item with the source ct_3.nii.gz, seg_3.nii.gz that differs in another value, or in how it spells a path",
        "seg_3.nii.gz changed (size 11 → 10)",
    ]


def test_records_that_are_gone_are_not_the_nearest(index: Index) -> None:
    add(index, 2, there=False)
    further = add(index, 1, pipeline="bbbb0000")
    assert nearest(index, *WANTED).entry == further


def test_a_pipeline_of_which_no_description_is_kept(index: Index) -> None:
    add(index, 1, pipeline="dddd0000")
    assert nearest(index, *WANTED).differences == [
        "the transforms or the settings differ (pipeline dddd0000 → cccc0000)"
    ]


def test_a_pipeline_whose_description_shows_no_difference(index: Index) -> None:
    add(index, 1)
    found = nearest(index, "item", "cccc0000", SOURCES, PIPELINE)
    assert found.differences == ["the transforms differ in a way that their description does not show"]


def test_a_record_that_should_have_been_found(index: Index) -> None:
    add(index, 1, pipeline="cccc0000")
    assert nearest(index, *WANTED).differences == ["nothing that the index holds differs"]


def test_another_policy_for_sources_is_not_another_content() -> None:
    before, now = {"/data/ct.nii.gz": (100, "0a" * 16)}, {"/data/ct.nii.gz": (100, "stat:1700000000")}
    told = "ct.nii.gz was identified by {} and is by {} now (sources=)"
    assert source_differences(before, now) == [told.format("its content", "its time")]
    assert source_differences(now, before) == [told.format("its time", "its content")]
    assert source_differences(now, {"/data/ct.nii.gz": (100, "stat:1800000000")}) == ["ct.nii.gz has another time"]


def test_a_reader_that_was_installed_is_one_line_with_a_remedy() -> None:
    load = "transforms[0] LoadImaged._loader.readers"
    before = {f"{load}[0].squeeze": "False", f"{load}[0].kwargs": "{}"}
    now = {**before, f"{load}[1].converter": "None", f"{load}[1].reverse": "True"}
    told = "LoadImaged._loader.readers[1] is {}: name the readers that count, as in reader='NibabelReader'"
    assert description_differences(before, now) == [told.format("new")]
    assert description_differences(now, before) == [told.format("gone")]
    first = {f"{load}[0].converter": "None", f"{load}[1].squeeze": "False", f"{load}[1].kwargs": "{}"}
    assert description_differences(before, first) == [told.format("new")], "the others have only moved up"
    named = {**before, "transforms[0] LoadImaged._loader.auto_select": "False"}
    assert told.partition(":")[0].format("gone") in description_differences(now, named)
    changed = {**before, f"{load}[0].squeeze": "True"}
    assert description_differences(before, changed) == ["LoadImaged._loader.readers[0].squeeze False → True"]


def test_data_that_were_moved_without_a_root(index: Index) -> None:
    there = {path.replace("/data", "/old"): source for path, source in SOURCES.items()}
    add(index, 1, item="the files of another item", sources=there | {"/old/more.nii": (5, "x")})
    entry = add(index, 2, item="at the old path", pipeline="cccc0000", sources=there)
    found = nearest(index, *WANTED)
    assert found.entry == entry
    (told,) = found.differences
    assert told.startswith(f"{CT} has the content of {CT.replace('/data', '/old')}: ")
    assert "root=" in told


@pytest.mark.parametrize("state", [(0, "aa" * 16), (-1, "absent"), (100, "stat:1700000000")])
def test_files_of_the_same_size_and_time_are_not_copies_of_one_another(index: Index, state: tuple[int, str]) -> None:
    add(index, 1, item="other", sources={"/old/x.nii": state})
    assert nearest(index, "item", "cccc0000", {"/data/y.nii": state}, {}).entry is None


def test_data_that_were_moved_with_their_root_and_changed(index: Index) -> None:
    there = {path.replace("/data", "/scratch/job1"): source for path, source in SOURCES.items()}
    there["/scratch/job1" + CT.removeprefix("/data")] = (90, "x")
    entry = add(index, 1, pipeline="cccc0000", sources=there)
    found = nearest(index, *WANTED)
    assert (found.entry, found.differences) == (entry, ["ct_3.nii.gz changed (size 90 → 100)"])
