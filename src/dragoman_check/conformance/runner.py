"""Run the clauses of protocols against a server."""

import fnmatch
from collections.abc import Iterator, Sequence

from dragoman_check.conformance import (
    batches,
    kserve_v1,
    lmi,
    open_inference_extensions,
    open_inference_generate,
    open_inference_grpc,
    open_inference_rest,
    open_responses,
    openai,
    tgi,
    umbridge,
)
from dragoman_check.conformance.clauses import (
    Clause,
    ClauseFailed,
    ClauseResult,
    NotOffered,
    NotTried,
    Outcome,
    Protocol,
)
from dragoman_check.conformance.target import Target

PROTOCOLS: Sequence[Protocol] = (
    open_inference_rest.PROTOCOL,
    open_inference_extensions.PROTOCOL,
    open_inference_generate.PROTOCOL,
    open_inference_grpc.PROTOCOL,
    umbridge.PROTOCOL,
    kserve_v1.PROTOCOL,
    openai.PROTOCOL,
    open_responses.PROTOCOL,
    batches.PROTOCOL,
    tgi.PROTOCOL,
    lmi.PROTOCOL,
)
_NO_HTTP = "no HTTP address; give the URL of the HTTP port"
_CHANGES = "changes the server; give --allow-changes"


def run_clauses(
    target: Target, protocols: Sequence[Protocol], only: Sequence[str] = (), allow_changes: bool = False
) -> Iterator[ClauseResult]:
    """Yield the result of each clause whose id matches a pattern of `only`, all of them by default."""
    for protocol in protocols:
        clauses = [c for c in protocol.clauses if not only or any(fnmatch.fnmatch(c.id, each) for each in only)]
        if not clauses:
            continue
        target.http.exchanges.clear()
        try:
            if not target.http.url and protocol is not open_inference_grpc.PROTOCOL:
                raise NotTried(_NO_HTTP)
            context = protocol.prepare(target)
        except (NotOffered, NotTried, ClauseFailed, ValueError, LookupError, TypeError) as error:
            outcome = Outcome.NOT_OFFERED if isinstance(error, NotOffered) else Outcome.NOT_TRIED
            exchanges = tuple(target.http.exchanges[-1:])
            yield from (ClauseResult(protocol, clause, outcome, str(error), exchanges) for clause in clauses)
            continue
        for clause in clauses:
            if clause.changes_server and not allow_changes:
                yield ClauseResult(protocol, clause, Outcome.NOT_TRIED, _CHANGES, ())
            else:
                target.http.exchanges.clear()
                yield _check(target, protocol, clause, context)


def _check(target: Target, protocol: Protocol, clause: Clause, context: object) -> ClauseResult:
    outcome, reason = Outcome.PASS, ""
    try:
        clause.check(context)
    except ClauseFailed as error:
        outcome, reason = Outcome.FAIL, str(error)
    except NotOffered as error:
        outcome, reason = Outcome.NOT_OFFERED, str(error)
    except NotTried as error:
        outcome, reason = Outcome.NOT_TRIED, str(error)
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # a response of another shape
        outcome, reason = Outcome.FAIL, f"expected a response of the documented shape, got {error!r}"
    return ClauseResult(protocol, clause, outcome, reason, tuple(target.http.exchanges))
