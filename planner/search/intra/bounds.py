"""Sequential tree-reweighted message passing (TRW-S): a bound and a guide.

With theta^_i = theta_i + sum_k m_ki and gamma_i = 1 / max(edges ahead, edges behind),
a pass sends from each node in order to its later neighbours

    m_ij(q) = min_p [ gamma_i theta^_i(p) - m_ji(p) + M_ij(p, q) ],

and the minima taken out on the way add up to a lower bound on the minimum (Kolmogorov,
"Convergent tree-reweighted message passing", 2006). Passes alternate in direction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.search.intra.core import Core
from planner.search.intra.problem import FloatArray, IntArray


class Messages:
    """Messages of a core; :meth:`sweep` runs one pass each way."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.into: list[dict[int, FloatArray]] = [
            {j: np.zeros(c.size) for j, _ in near}
            for c, near in zip(core.cost, core.near, strict=True)
        ]
        self._gamma = [
            1.0 / max(sum(j > i for j, _ in near), sum(j < i for j, _ in near), 1)
            for i, near in enumerate(core.near)
        ]
        self._ahead = [
            [(j, np.ascontiguousarray(m)) for j, m in back if j > i]
            for i, back in enumerate(core.back)
        ]
        self._behind = [
            [(j, np.ascontiguousarray(m)) for j, m in back if j < i]
            for i, back in enumerate(core.back)
        ]

    def sweep(self, theta: Sequence[FloatArray]) -> float:
        """Forward, then backward. Returns the bound for costs ``theta``."""
        self._half(theta, range(self.core.count), self._ahead)
        return self._half(theta, range(self.core.count - 1, -1, -1), self._behind)

    def slack(self, theta: Sequence[FloatArray]) -> list[FloatArray]:
        """How far each strategy lies above its node's best when the forward pass comes
        by. Every chain of the decomposition through i has gamma_i theta^_i as its
        min-marginal there, so the bound of the sweep before plus the slack of k is
        below the cost of every choice with x_i = k."""
        out: list[FloatArray] = []
        self._half(theta, range(self.core.count), self._ahead, out)
        return out

    def _half(
        self,
        theta: Sequence[FloatArray],
        order: range,
        targets: list[list[tuple[int, FloatArray]]],
        slack: list[FloatArray] | None = None,
    ) -> float:
        into, bound = self.into, 0.0
        for i in order:
            mine = into[i]
            total = theta[i]
            for message in mine.values():
                total = total + message
            least = float(total.min())
            bound += least
            total = total - least
            if slack is not None:
                slack.append(total)
            share = total * self._gamma[i]
            for j, m in targets[i]:
                out = (m + (share - mine[j])).min(axis=1)
                low = float(out.min())
                bound += low
                into[j][i] = out - low
        return bound

    def decode(self, theta: Sequence[FloatArray]) -> IntArray:
        """A choice, node by node: edges to decided neighbours as they are, messages
        from the others."""
        x = np.zeros(self.core.count, dtype=np.int64)
        for i in range(self.core.count):
            total = theta[i]
            for j, m in self.core.near[i]:
                total = total + (m[:, x[j]] if j < i else self.into[i][j])
            x[i] = total.argmin()
        return x
