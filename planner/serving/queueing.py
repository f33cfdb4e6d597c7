"""Requests that arrive at random: a discrete-event server, and the closed form.

The simulation is of continuous batching: between two decode steps waiting requests are
admitted while the batch limit allows, each admission costs its prefill, then every
sequence in flight gets one token. Arrivals are Poisson with a fixed seed.

Closed form. A server with ``limit`` slots, each busy for S = prefill + output_len x
step, is an M/G/c queue; its mean wait is approximated by Erlang's C with half the wait
of exponential service times for service that hardly varies (Allen and Cunneen 1978:
(Ca^2 + Cs^2) / 2 = 1/2).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, lgamma, log


@dataclass(frozen=True, slots=True)
class QueueResult:
    """What requests saw. Waits end where prefill begins."""

    requests: int
    mean_wait_s: float
    p50_ttft_s: float
    p95_ttft_s: float
    p95_tpot_s: float
    mean_in_flight: float
    makespan_s: float


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits; ``load`` = arrival rate x service time."""
    if load >= servers:
        return 1.0
    if load <= 0:
        return 0.0
    logs = [k * log(load) - lgamma(k + 1) for k in range(servers)]
    last = servers * log(load) - lgamma(servers + 1) + log(servers / (servers - load))
    top = max(*logs, last)
    return exp(last - top) / (sum(exp(x - top) for x in logs) + exp(last - top))


def closed_form_wait(
    arrival_per_s: float, service_s: float, servers: int, variation: float = 0.0
) -> float:
    """Mean seconds in the queue; ``variation``: squared coefficient of variation of
    the service time. Infinite load gives ``inf``."""
    load = arrival_per_s * service_s
    if load >= servers:
        return float("inf")
    wait = erlang_c(servers, load) * service_s / (servers - load)
    return wait * (1 + variation) / 2


def simulate(
    arrival_per_s: float,
    prefill_s: float,
    step_s: Callable[[int], float],
    output_len: int,
    limit: int,
    requests: int = 400,
    seed: int = 7,
) -> QueueResult:
    """Serve ``requests`` Poisson arrivals on one instance with ``limit`` slots.

    step_s(n): seconds of a decode step with n sequences in flight.
    """
    random_ = random.Random(seed)
    now, arrivals = 0.0, deque[float]()
    for _ in range(requests):
        now += random_.expovariate(arrival_per_s)
        arrivals.append(now)
    clock = 0.0
    waiting: deque[float] = deque()
    # a request ends after output_len - 1 more steps: (step it ends at, first token)
    flight: list[tuple[int, float]] = []
    steps = 0
    waits: list[float] = []
    firsts: list[float] = []
    per_token: list[float] = []
    area = 0.0
    while arrivals or waiting or flight:
        if not flight and not waiting:
            clock = max(clock, arrivals[0])
        while arrivals and arrivals[0] <= clock:
            waiting.append(arrivals.popleft())
        started = clock
        while waiting and len(flight) < limit:
            came = waiting.popleft()
            waits.append(clock - came)
            clock += prefill_s
            firsts.append(clock - came)
            heapq.heappush(flight, (steps + max(1, output_len - 1), clock))
        clock += step_s(len(flight))
        steps += 1
        area += len(flight) * (clock - started)
        while flight and flight[0][0] <= steps:
            _, first = heapq.heappop(flight)
            per_token.append((clock - first) / max(1, output_len - 1))
    return QueueResult(
        requests,
        sum(waits) / len(waits),
        _quantile(firsts, 0.5),
        _quantile(firsts, 0.95),
        _quantile(per_token, 0.95),
        area / clock,
        clock,
    )


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
