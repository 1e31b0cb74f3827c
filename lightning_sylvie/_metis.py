"""METIS in a process of its own, so that a crash of it ends nothing else.

`solve_apart` runs this very file as ``python -I _metis.py FOLDER``. That process imports numpy and
pymetis only, so it starts fast. FOLDER holds ``job.json`` (num_parts, seed, objective, imbalance,
and the import path to use), ``edge_index.npy`` int64 ``(2, E)`` and ``weights.npy`` int64
``(num_nodes, num_weights)``; ``parts.npy`` int64 ``(num_nodes,)`` appears beside them.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_SCRIPT = Path(__file__)
_OBJTYPE, _SEED, _UFACTOR, _NUMBERING = 1, 8, 16, 17  # places in METIS's options, metis.h
_OBJECTIVES = {"cut": 0, "volume": 1}


def solve_apart(
    edge_index: Ints,
    weights: Ints,
    *,
    num_parts: int,
    seed: int,
    objective: str,
    imbalance: float,
) -> Ints:
    """The part of each node, as METIS in another process finds it.

    Raises:
        RuntimeError: The process died or failed; says how, and what to use instead.
    """
    import numpy as np

    with tempfile.TemporaryDirectory(prefix="lightning_sylvie_metis_") as name:
        folder = Path(name)
        np.save(folder / "edge_index.npy", edge_index)
        np.save(folder / "weights.npy", weights)
        job = {"num_parts": num_parts, "seed": seed, "objective": objective}
        job |= {"imbalance": imbalance, "path": [str(entry) for entry in sys.path]}
        (folder / "job.json").write_text(json.dumps(job))
        _run(folder)
        parts: Ints = np.load(folder / "parts.npy")
        return parts


def _run(folder: Path) -> None:
    cure = "use partition='random' or 'streaming', or give an assignment"
    try:
        child = subprocess.run(
            [sys.executable, "-I", str(_SCRIPT), str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise RuntimeError(f"METIS could not be started ({error}): {cure}") from error
    if child.returncode < 0:
        number = -child.returncode
        name = {known.value: known.name for known in signal.Signals}.get(number, f"signal {number}")
        hint = ", most likely for lack of memory" if name == "SIGKILL" else ""
        raise RuntimeError(f"METIS was ended by {name}{hint}: {cure}")
    if child.returncode > 0:
        said = child.stderr.strip().splitlines()[-1:] or ["no message"]
        if "No module named 'pymetis'" in said[0]:
            cure = f"pip install pymetis, {cure}"
        raise RuntimeError(f"METIS failed with exit code {child.returncode} ({said[0]}): {cure}")


@dataclass(frozen=True)
class Problem:
    """An undirected graph without loops in METIS's form, with weights per node."""

    xadj: Ints  # (num_nodes + 1,)
    adjncy: Ints  # neighbours of node i at xadj[i]:xadj[i + 1]
    weights: Ints  # (num_nodes, num_weights)
    num_parts: int
    seed: int
    imbalance: float

    @property
    def num_nodes(self) -> int:
        return len(self.weights)

    def volume(self, parts: Ints) -> int:
        """Halo rows of all parts together: each node counts once per foreign neighbour part."""
        import numpy as np

        source = np.repeat(np.arange(self.num_nodes), np.diff(self.xadj))
        foreign = parts[self.adjncy]
        crossing = parts[source] != foreign
        return len(np.unique(source[crossing] * self.num_parts + foreign[crossing]))

    def badness(self, parts: Ints) -> tuple[float, int]:
        """What is best low: the imbalance beyond the allowed one, then the volume."""
        import numpy as np

        loads = np.zeros((self.num_parts, self.weights.shape[1]), np.int64)
        np.add.at(loads, parts, self.weights)
        worst = float((loads.max(axis=0) / loads.mean(axis=0)).max())
        return max(worst, 1 + 2 * self.imbalance), self.volume(parts)


def undirected(edge_index: Ints, num_nodes: int) -> tuple[Ints, Ints]:
    """Row starts and neighbours of the graph with both directions, no loops and no duplicates."""
    import numpy as np

    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    both = np.concatenate([source * num_nodes + target, target * num_nodes + source])
    both = np.unique(both)
    xadj = np.searchsorted(both, np.arange(num_nodes + 1) * num_nodes)
    return xadj.astype(np.int64), both % num_nodes


def solve(problem: Problem, objective: str) -> Ints:
    """Parts by METIS's k-way method, every weight balanced.

    pymetis passes one weight per node; METIS takes several. So METIS is called where pymetis
    carries it, and pymetis itself (balancing the first weight only) where its build hides it.
    """
    import pymetis
    from pymetis import _internal

    library = ctypes.CDLL(_internal.__file__)
    if hasattr(library, "METIS_PartGraphKway") and hasattr(pymetis, "zero_copy_dtype"):
        return _solve_all_weights(problem, objective, library, str(pymetis.zero_copy_dtype()))
    return _solve_first_weight(problem, objective)


def _solve_all_weights(problem: Problem, objective: str, library: Any, integer: str) -> Ints:
    import numpy as np

    dtype = np.dtype(integer)
    if max(problem.xadj[-1], problem.weights.sum()) > np.iinfo(dtype).max:
        raise OverflowError("the graph has more edges than this build of METIS can number")
    options = np.full(40, -1, dtype)
    options[_OBJTYPE] = _OBJECTIVES[objective]
    options[_SEED] = problem.seed
    options[_UFACTOR] = round(problem.imbalance * 1000)
    options[_NUMBERING] = 0
    parts = np.zeros(problem.num_nodes, dtype)
    scalars = [problem.num_nodes, problem.weights.shape[1], problem.num_parts, 0]
    num_nodes, num_weights, num_parts, result = (np.array([value], dtype) for value in scalars)
    xadj, adjncy = problem.xadj.astype(dtype), problem.adjncy.astype(dtype)
    weights = np.ascontiguousarray(problem.weights, dtype)
    arrays = [num_nodes, num_weights, xadj, adjncy, weights, None, None, num_parts, None, None]
    arguments = [
        None if array is None else array.ctypes.data_as(ctypes.c_void_p)
        for array in [*arrays, options, result, parts]
    ]
    status = library.METIS_PartGraphKway(*arguments)
    if status != 1:
        raise RuntimeError(f"METIS_PartGraphKway returned {status}")
    return parts.astype(np.int64)


def _solve_first_weight(problem: Problem, objective: str) -> Ints:
    import numpy as np
    import pymetis

    options = pymetis.Options(seed=problem.seed, ufactor=round(problem.imbalance * 1000))
    options.objtype = _OBJECTIVES[objective]
    weights = problem.weights[:, 0].tolist()
    adjacency = pymetis.CSRAdjacency(problem.xadj, problem.adjncy)
    answer = pymetis.part_graph(
        problem.num_parts, adjacency, vweights=weights, recursive=False, options=options
    )
    return np.array(answer.vertex_part, np.int64)


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    sys.path[:] = job["path"]
    import numpy as np

    weights = np.load(folder / "weights.npy")
    edge_index = np.load(folder / "edge_index.npy", mmap_mode="r")
    problem = Problem(
        *undirected(edge_index, len(weights)),
        weights,
        job["num_parts"],
        job["seed"],
        job["imbalance"],
    )
    # METIS's volume objective now and then ends with more volume than its cut objective.
    objectives = ("volume", "cut") if job["objective"] == "volume" else ("cut",)
    candidates = [solve(problem, objective) for objective in objectives]
    np.save(folder / "parts.npy", min(candidates, key=problem.badness))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
