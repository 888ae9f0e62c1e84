"""From a request to its result: complete already, the rest of an interrupted run, or a new run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from setfold.core.persist import digest_of
from setfold.errors import InputError
from setfold.files.columns import stored_type
from setfold.files.journal import Journal
from setfold.files.outputs import check_target
from setfold.files.plan import Plan, computing
from setfold.files.request import ReadOptions
from setfold.files.results import read_result
from setfold.files.run import Engine, Output, Run, Summary, publish, summarize_complete
from setfold.files.tables.absorb import blames_elements, reason_of
from setfold.files.work_folder import check_replaceable, open_work_folder, verify_outputs


class Job(NamedTuple):
    """What a request amounts to.

    Args:
        plan: What to read.
        outputs: What to write.
    """

    plan: Plan
    outputs: list[Output]


Prepare = Callable[[Collection[Path]], Job]  # from files that are not inputs, as resolved paths


def execute(
    request: dict[str, Any],
    outputs: Sequence[str | Path],
    prepare: Prepare,
    engine: Engine,
    options: ReadOptions,
) -> Summary:
    """Run a request, or the rest of it if it was interrupted.

    Args:
        request: The description of the request.
        outputs: The files that it writes.
        prepare: Makes the plan. It is not called if an interrupted run had computed everything.
        engine: The function that computes the steps.
        options: The options of the run.
    """
    paths, resume = [Path(path).resolve() for path in outputs], options["resume"]
    _check_targets(paths)
    with open_work_folder(
        paths,
        request,
        resume=resume,
        restart=options["restart"],
        save_every=options["save_every"],
    ) as work:
        if work.journal is not None and work.journal.outputs:  # only the final renaming is left
            work.journal.overwrite |= options["overwrite"]
            verify_outputs(work)
            return publish(work)
        finished = [path for path in paths if resume and read_result(path)]
        job = _with_results(prepare(finished), request["command"])
        if resume and _is_complete(job):
            return summarize_complete(job.plan, job.outputs)
        with computing(job.plan.task.encoder):
            _check_contents(job)
            _check_inputs_are_kept(job.plan, paths)
            run = Run(job.plan, work, engine, job.outputs, options["progress"])
            _check_existing(run.journal, job, options)
            return run.run()


def check_outputs(
    request: dict[str, Any],
    outputs: Sequence[str | Path],
    prepare: Prepare,
    options: ReadOptions,
) -> Summary | None:
    """Return the summary of a request that is complete; None if there is something to do.

    Raises:
        InputError: `execute` could not write the outputs, so that the work before would be lost.
    """
    paths, resume = [Path(path).resolve() for path in outputs], options["resume"]
    _check_targets(paths)
    restart, save_every = options["restart"], options["save_every"]
    with open_work_folder(
        paths, request, resume=resume, restart=restart, save_every=save_every
    ) as work:
        if work.journal is not None:
            return None
        finished = [path for path in paths if resume and read_result(path)]
        job = _with_results(prepare(finished), request["command"])
        if resume and _is_complete(job):
            return summarize_complete(job.plan, job.outputs)
        _check_contents(job)
        _check_inputs_are_kept(job.plan, paths)
        for output in job.outputs:
            digest, overwrite = output.digest if resume else None, options["overwrite"]
            check_replaceable(output.path, digest, overwrite=overwrite)
        return None


def _check_targets(paths: Sequence[Path]) -> None:
    """Raise InputError if the outputs cannot be written."""
    if len({*paths}) < len(paths):
        raise InputError(
            f"encodings and states must go to different files; got {paths[0]} for both. Choose "
            "another name for one of them."
        )
    for path in paths:
        check_target(path)


def _check_contents(job: Job) -> None:
    """Raise InputError if the encodings cannot be computed, or an output cannot store the ids."""
    encoder = job.plan.task.encoder
    for output in job.outputs:
        kind = stored_type(job.plan.set_type) if output.holds_states else job.plan.set_type
        kinds = [field.type for field in kind] if pa.types.is_struct(kind) else [kind]
        if not all(map(output.sink.can_store, kinds)):
            raise InputError(
                f"the set ids are {job.plan.set_type}, which {output.path} cannot store. Write a "
                ".parquet or .arrow file instead."
            )
        try:
            if not output.holds_states:
                encoder.readout(encoder.initial_state(1))
        except Exception as error:  # a head may contain any code
            if not blames_elements(error):
                raise
            raise InputError(
                f"the model cannot be read out: {reason_of(error)}. Correct its head."
            ) from error


def _check_inputs_are_kept(plan: Plan, paths: Sequence[Path]) -> None:
    """Raise InputError if an output would replace an input."""
    if not any(path.exists() for path in paths):
        return
    named = {*plan.inputs, *(entry.file for entry in plan.skipped if entry.file)}
    inputs = {Path(name).resolve() for name in named} | {p.resolve() for p in plan.left_out}
    for path in paths:
        if path in inputs:
            raise InputError(
                f"{path} is an input and would be replaced, which --overwrite does not allow, "
                "either. Choose another output."
            )


def _with_results(job: Job, command: str) -> Job:
    """Add to each output a digest of everything that determines its content."""
    signature = job.plan.signature()
    outputs = [output._replace(path=output.path.resolve()) for output in job.outputs]
    for number, output in enumerate(outputs):
        what = [command, output.holds_states, signature]
        outputs[number] = output._replace(digest=digest_of({}, json.dumps(what)))
    return job._replace(outputs=outputs)


def _is_complete(job: Job) -> bool:
    """Whether all outputs exist and are the results of this job."""
    return all(read_result(o.path) == o.digest for o in job.outputs)


def _check_existing(journal: Journal, job: Job, options: ReadOptions) -> None:
    """Raise an error if an output must not be replaced, and note what may be replaced."""
    journal.overwrite |= options["overwrite"]
    for output in job.outputs:
        check_replaceable(
            output.path,
            output.digest if options["resume"] else None,
            overwrite=journal.overwrite,
        )
