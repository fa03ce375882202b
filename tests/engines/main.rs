//! oci-mps with real engines and the real control daemon, on a machine without a GPU: `cuInit` returns 805 in a
//! container that reaches MPS and 100 in one that does not.
//!
//! ```text
//! tests/engines/prepare            once: brings the engines, the daemons and the test image
//! cargo test --test engines        all of it
//! cargo test --test engines nerdctl        one engine
//! cargo test --test engines refuses        one kind of case
//! ```
//!
//! `cases` is what is promised, `engine` how each engine is asked, `host` an installation of oci-mps of our own.

mod cases;
mod container;
mod engine;
mod host;
mod leftovers;
mod machine;
mod processes;
mod report;

use std::cell::Cell;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use cases::{Case, Verdict};
use engine::{ENGINES, Kind, Session};
use report::Report;

/// An engine's session, which its first test opens, and all share.
type Shared = Arc<Mutex<Option<Session>>>;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    std::panic::set_hook(Box::new(|panic| FAILED_AT.set(panic.location().map(ToString::to_string))));
    let report = Arc::new(Report::default());
    let cases: Vec<Arc<Case>> = cases::all().into_iter().map(Arc::new).collect();
    let sessions: Vec<(&'static Kind, Shared)> =
        ENGINES.iter().map(|kind| (kind, Shared::default())).collect();
    // engine by engine within each case, so that two tests at once are mostly on two engines
    let trials = cases.iter().flat_map(|case| {
        let on = sessions.iter().filter(|(kind, _)| case.is_for(kind.name));
        on.map(|(kind, session)| trial(kind, session, case, &report)).collect::<Vec<_>>()
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    if arguments.list {
        return ExitCode::SUCCESS;
    }
    let mut left = Vec::new();
    for (kind, session) in sessions {
        let session = session.lock().unwrap_or_else(PoisonError::into_inner).take();
        left.extend(session.and_then(|session| leftovers::of(session, kind.name)));
    }
    report.print();
    if left.is_empty() {
        return conclusion.exit_code();
    }
    eprintln!("left over on this machine:\n{}", left.join("\n"));
    ExitCode::FAILURE
}

fn trial(kind: &'static Kind, session: &Shared, case: &Arc<Case>, report: &Arc<Report>) -> Trial {
    let (session, case, report) = (session.clone(), case.clone(), report.clone());
    let name = format!("{}::{}", kind.name, case.name);
    Trial::ignorable_test(name, move || {
        let outcome = run(kind, &session, &case);
        report.note(kind, &outcome);
        outcome
    })
}

fn run(kind: &'static Kind, session: &Shared, case: &Case) -> Result<Completion, Failed> {
    if let Some(reason) = kind.lacks() {
        return Ok(Completion::ignored_with(reason));
    }
    // a test that panicked has said why; the next one begins afresh
    let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
    let failed = |error: anyhow::Error| Failed::from(format!("{error:#}"));
    if session.is_none() {
        *session = Some(Session::open(kind).map_err(failed)?);
    }
    let session = session.as_mut().expect("it was opened");
    session.host.fresh().map_err(failed)?;
    let verdict = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case.run(session)));
    let verdict = verdict.map_err(|panic| Failed::from(message(panic.as_ref())))?;
    Ok(match verdict {
        Verdict::Shown => Completion::Completed,
        Verdict::Skipped(reason) => Completion::ignored_with(reason),
    })
}

thread_local! {
    /// Where the last panic of this thread was: told with the test's failure, and not at once.
    static FAILED_AT: Cell<Option<String>> = const { Cell::new(None) };
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
    format!("{}: {}", FAILED_AT.take().unwrap_or_default(), text.unwrap_or_else(|| "a panic".to_owned()))
}
