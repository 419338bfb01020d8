"""The measurements on GPUs, which no test runs where there is none."""

import pkgutil
from importlib import import_module

import pytest

from tests import gpu


@pytest.mark.parametrize("name", sorted(each.name for each in pkgutil.iter_modules(gpu.__path__)))
def test_a_measurement_can_be_imported_without_a_gpu(name: str) -> None:
    import_module(f"tests.gpu.{name}")
