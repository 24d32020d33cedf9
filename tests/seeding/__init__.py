from __future__ import annotations

from typing import Any

from minato._core import Seeder
from minato.seeding.generator_states import plan_all


def seeder_of(*private: Any, **options: Any) -> Seeder:
    """A Seeder of the global generators and of private ones; options as in plan_all()."""
    return Seeder(plan_all(*private, **options))
