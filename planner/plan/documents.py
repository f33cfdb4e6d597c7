"""The two documents: a chosen plan, and the price of a given configuration."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from pydantic import Field, ValidationError

from planner.errors import PlannerError
from planner.plan.jsontext import dumps
from planner.plan.records import (
    AlternativeRecord,
    CertificateRecord,
    ClusterRecord,
    CollectiveRecord,
    EstimateRecord,
    MeshRecord,
    ModelRecord,
    PlacementRecord,
    ProvenanceRecord,
    RecomputeText,
    Record,
    StageRecord,
    VerdictRecord,
    WorkloadRecord,
    plain,
)
from planner.plan.serving import ServingRecord
from planner.workload import Parallelism

if TYPE_CHECKING:
    from planner.search.check import Violation

SCHEMA_VERSION = 1
#: Larger files are refused unread; a plan for 1024 GPUs and 96 layers is under 5 MB.
MAX_FILE_BYTES = 64 * 2**20


class Document(Record):
    """What a plan and a prediction share."""

    schema_version: Literal[1] = SCHEMA_VERSION
    model: ModelRecord
    cluster: ClusterRecord
    workload: WorkloadRecord
    parallelism: Parallelism
    mesh: MeshRecord
    stages: tuple[StageRecord, ...]
    #: Block name to mode; blocks that are not named keep their activations.
    recompute: dict[str, RecomputeText] = Field(
        default_factory=dict[str, RecomputeText]
    )
    #: Name or pattern to placement.
    placements: dict[str, PlacementRecord] = Field(
        default_factory=dict[str, PlacementRecord]
    )
    collectives: tuple[CollectiveRecord, ...] = ()
    estimate: EstimateRecord
    #: How a model is served; absent in training plans.
    serving: ServingRecord | None = None
    warnings: tuple[str, ...] = ()
    provenance: ProvenanceRecord

    def to_json(self) -> str:
        """The document as JSON text: same content, same bytes."""
        return dumps(plain(self))

    def save(self, path: str | Path) -> None:
        """Writes the JSON whole or not at all (temporary file, fsync, rename)."""
        write_atomic(Path(path), self.to_json())

    def summary(self) -> str:
        """A screenful of plain text, at most 80 columns wide."""
        from planner.plan.summary import summary

        return summary(self)


class Plan(Document):
    """A chosen plan (schema_version 1)."""

    document: Literal["plan"] = "plan"
    certificate: CertificateRecord
    alternatives: tuple[AlternativeRecord, ...] = ()

    def check(self, *, recompute: bool = False) -> list[Violation]:
        """What is wrong with the document, by rules that do not know the solver.

        ``recompute`` prices the plan again from its model, where that can be built.
        """
        from planner.search.check import check

        return check(self, recompute=recompute)


class Prediction(Document):
    """The price of a configuration that the user gave."""

    document: Literal["prediction"] = "prediction"
    verdict: VerdictRecord


_AnyDocument = TypeVar("_AnyDocument", Plan, Prediction)


def write_atomic(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text``; PlannerError where it can not be written."""
    try:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
        )
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _unwritable(path: Path, error: OSError) -> PlannerError:
    return PlannerError(
        f"can not write the file ({error.strerror})", path, "give another path"
    )


def load_plan(path: str | Path) -> Plan:
    """Reads and validates a plan file; PlannerError says in one line what is wrong."""
    return parse_plan(_read(Path(path)), str(path))


def load_prediction(path: str | Path) -> Prediction:
    """Reads and validates what ``planner predict --json`` printed."""
    return _parse(Prediction, _read(Path(path)), str(path))


def load_document(path: str | Path) -> Plan | Prediction:
    """Reads a plan or a prediction, whichever the file says that it is."""
    text, name = _read(Path(path)), str(path)
    if _plain_data(text, name).get("document") == "prediction":
        return _parse(Prediction, text, name)
    return _parse(Plan, text, name)


def parse_plan(text: str | bytes, name: str = "plan") -> Plan:
    """The plan in JSON ``text``; ``name`` is how errors call it."""
    return _parse(Plan, text, name)


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise PlannerError(
                "the plan file is too large",
                f"{path}, {size} bytes",
                f"a plan has at most {MAX_FILE_BYTES} bytes",
            )
        return path.read_bytes()
    except OSError as error:
        raise PlannerError(
            f"can not read the plan file ({error.strerror})",
            path,
            "give the path of a file that `planner optimize -o` wrote",
        ) from error


def _plain_data(text: str | bytes, name: str) -> dict[str, Any]:
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlannerError(
            "the plan file is not JSON", f"{name} ({error})", "plan it again"
        ) from error
    if not isinstance(data, dict):
        raise PlannerError("the plan file is not a plan", name, "plan it again")
    return cast("dict[str, Any]", data)


def _parse(kind: type[_AnyDocument], text: str | bytes, name: str) -> _AnyDocument:
    data = _plain_data(text, name)
    _check_version(data.get("schema_version"), name)
    expected, said = kind.model_fields["document"].default, data.get("document")
    if said != expected and said in ("plan", "prediction"):
        raise PlannerError(
            f"the file holds a {said}, not a {expected}",
            name,
            "`planner optimize -o` writes plans, `planner predict --json` predictions",
        )
    try:
        return kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "top level"
        more = f" and {n} more" if (n := error.error_count() - 1) else ""
        raise PlannerError(
            f"the plan file does not follow the schema at {where}",
            f"{name} ({first['msg']}{more})",
            "restore the file or plan again; `planner schema` prints the schema",
        ) from error
    except PlannerError as error:
        raise PlannerError(
            "the plan file has an illegal value", f"{name} ({error})", "plan it again"
        ) from error


def _check_version(version: object, name: str) -> None:
    if version == SCHEMA_VERSION and not isinstance(version, bool):
        return
    if isinstance(version, int) and version > SCHEMA_VERSION:
        fix = "upgrade parallel-planner to read it"
    else:
        fix = "plan again to write it in this version's schema"
    raise PlannerError(
        f"the plan file has schema_version {version}, this version reads "
        f"{SCHEMA_VERSION}",
        name,
        fix,
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a plan file."""
    schema = Plan.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema
