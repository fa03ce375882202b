//! What is promised, and how it is shown on an engine.

mod admission;
mod build;
mod bundle;
mod damage;
mod full;
mod life;
mod promise;
mod refusal;
mod share;
mod spec;

use std::time::Duration;

use crate::engine::Session;
use crate::machine::Reason;
use crate::processes;

/// What became of a case that did not fail.
pub(crate) enum Verdict {
    Shown,
    Skipped(Reason),
}

/// Where a case is tried.
#[derive(Clone, Copy)]
enum On {
    Every,
    Only(&'static [&'static str]),
}

/// One promise.
pub(crate) struct Case {
    pub(crate) name: String,
    on: On,
    check: Box<dyn Fn(&mut Session) -> Verdict + Send + Sync>,
}

/// All cases, those first that show that an engine works at all.
pub(crate) fn all() -> Vec<Case> {
    [
        promise::cases(),
        spec::cases(),
        share::cases(),
        admission::cases(),
        bundle::cases(),
        build::cases(),
        damage::cases(),
        refusal::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

impl Case {
    fn every(name: &str, check: fn(&mut Session)) -> Self {
        Self::on(On::Every, name, check)
    }

    fn only(engines: &'static [&'static str], name: &str, check: fn(&mut Session)) -> Self {
        Self::on(On::Only(engines), name, check)
    }

    fn on(on: On, name: &str, check: fn(&mut Session)) -> Self {
        let check = move |session: &mut Session| {
            check(session);
            Verdict::Shown
        };
        Self { name: name.to_owned(), on, check: Box::new(check) }
    }

    pub(crate) fn is_for(&self, engine: &str) -> bool {
        match self.on {
            On::Every => true,
            On::Only(engines) => engines.contains(&engine),
        }
    }

    /// Shows it, and that afterwards nobody holds a share.
    pub(crate) fn run(&self, session: &mut Session) -> Verdict {
        let verdict = (self.check)(session);
        session.host.mend().unwrap_or_else(|error| panic!("{error:#}"));
        let is_free = processes::wait_for(Duration::from_secs(2), || session.host.shares().is_empty());
        assert!(is_free, "shares that were not given back: {:?}", session.host.shares());
        verdict
    }
}
