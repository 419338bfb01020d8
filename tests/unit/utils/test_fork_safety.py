"""Whether CUDA's driver was initialized, asked of a driver that answers as CUDA's does."""

import pytest

from pipeline.utils.fork_server import driver_is_initialized


class Driver:
    """`cuDeviceGetCount` before and after `cuInit`."""

    def __init__(self) -> None:
        self.initialized = False

    def cuInit(self, flags: int) -> int:
        self.initialized = True
        return 0

    def cuDeviceGetCount(self, count: object) -> int:
        return 0 if self.initialized else 3


def test_a_driver_counts_as_initialized_from_cuinit_on() -> None:
    driver = Driver()
    assert not driver_is_initialized(driver)
    driver.cuInit(0)
    assert driver_is_initialized(driver)


def test_a_machine_without_a_driver_has_initialized_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert not driver_is_initialized()
