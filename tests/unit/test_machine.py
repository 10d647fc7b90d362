"""Machine profiles: numbers with sources, the first N GPUs, and refusals that name key and file."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpress.errors import InputError
from mpress.machine import known_machines, load_machine
from mpress.units import GIB

PROFILES = Path(__file__).parents[2] / "profiles" / "mpress_profiles"
KNOWN = ("dgx-a100-40gb", "dgx-a100-80gb", "dgx1-v100-32gb", "hgx-h100-80gb")


def test_the_built_in_profiles_load() -> None:
    assert known_machines() == KNOWN
    for name in KNOWN:
        machine = load_machine(name, gpus=8)
        assert machine.name == name and len(machine.devices) == len(machine.links) == len(machine.host_bandwidth) == 8
        assert all(machine.links[a][b] == machine.links[b][a] for a in range(8) for b in range(8))


def test_the_cube_mesh_has_twelve_pairs_without_a_link() -> None:
    machine = load_machine("dgx1-v100-32gb", gpus=8)
    pairs = [float(machine.links[a][b]) for a in range(8) for b in range(a)]
    assert (pairs.count(0.0), pairs.count(24.2e9), pairs.count(48.3e9)) == (12, 8, 8)
    assert machine.pair_bandwidth(0, 4) == 48.3e9 and machine.pair_bandwidth(0, 5) == 12.3e9
    assert "bfloat16" not in dict(machine.devices[0].peak_flops)


def test_flash_attention_needs_compute_capability_8() -> None:
    assert [load_machine(name, gpus=1).devices[0].flash_attention for name in KNOWN] == [True, True, False, True]


def test_the_first_gpus_are_taken_and_the_reserve_kept() -> None:
    machine = load_machine("dgx-a100-40gb", gpus=3, reserve=0.1)
    assert [members for members, _ in machine.uplinks] == [(0, 1), (2,)]
    assert machine.usable_bytes(2) == int(40 * GIB * 0.9)
    assert len(machine.links) == 3 and all(len(row) == 3 for row in machine.links)


@pytest.mark.parametrize("name", KNOWN)
def test_a_path_reads_the_same(name: str) -> None:
    assert load_machine(str(PROFILES / f"{name}.toml"), gpus=8) == load_machine(name, gpus=8)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("capacity_gib", "capacity", "device.capacity"),
        ("{ value = 40,", "{ value = -40,", "device.capacity_gib.value"),
        ("{ value = 40,", '{ value = "40",', "device.capacity_gib.value"),
        ("{ value = 40, source", "{ value = 40, sauce", "device.capacity_gib.source"),
        ("[0, 1], [2, 3]", "[0, 1], [1, 3]", "host.uplink_groups"),
        ("devices = 8", "devices = 0", "devices"),
        ("uplink_groups =", "uplink_group =", "host.uplink_groups"),
        ("flash_attention = { value = true,", "flash_attention = { value = 1,", "device.flash_attention.value"),
        ("efficiency = { value = 0.55", "efficiency = { value = 55", "device.efficiency"),
    ],
)
def test_a_bad_key_is_named_with_its_file(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = (PROFILES / "dgx-a100-40gb.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError) as refusal:
        load_machine(str(path), gpus=8)
    assert words in refusal.value.message and "mine.toml" in refusal.value.where


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((PROFILES / "dgx-a100-40gb.toml").read_text() + '\nspeed = { value = 1, source = "me" }\n')
    with pytest.raises(InputError, match=r"'host\.speed' is not a key"):
        load_machine(str(path), gpus=8)


def test_refusals_name_what_was_asked(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        load_machine("dgx-9", gpus=8)
    assert "dgx-a100-40gb" in refusal.value.hint
    with pytest.raises(InputError, match="9 GPUs asked for"):
        load_machine("dgx-a100-40gb", gpus=9)
    with pytest.raises(InputError, match="reserve"):
        load_machine("dgx-a100-40gb", gpus=8, reserve=1.0)
    with pytest.raises(InputError, match="no profile"):
        load_machine(str(tmp_path / "none.toml"), gpus=8)
    (tmp_path / "bad.toml").write_text("name =")
    with pytest.raises(InputError, match="not TOML"):
        load_machine(str(tmp_path / "bad.toml"), gpus=8)
