"""What is asked of a model: every task by name."""

from __future__ import annotations

from benchmarks.quality.tasks import needles, reading, records, repository, shots, texts, turns
from benchmarks.quality.tasks.items import Task

_MODULES = (texts, needles, records, reading, shots, repository, turns)

TASKS: dict[str, Task] = {task.name: task for module in _MODULES for task in module.TASKS}
