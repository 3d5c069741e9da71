"""Where the work of a plan is made: a directory, and an object store in memory."""

from __future__ import annotations

import pytest

from tests.write.place import Place
from tests.write.planning import SmallPlan


@pytest.fixture(params=["local", "remote"])
def place(request, tmp_path):
    place = Place(request.param, tmp_path)
    yield place
    place.close()


@pytest.fixture
def plan():
    return SmallPlan()
