//! What was tried on which engine, and what was not: printed at the end, whatever was asked for.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use libtest_mimic::{Completion, Failed};

use crate::engine::{ENGINES, Kind};

/// The tests of one engine.
#[derive(Default)]
struct Tally {
    passed: u32,
    failed: u32,
    /// How many were skipped for which reason.
    skipped: BTreeMap<String, u32>,
}

#[derive(Default)]
pub(crate) struct Report {
    tallies: Mutex<BTreeMap<&'static str, Tally>>,
}

impl Report {
    pub(crate) fn note(&self, kind: &Kind, outcome: &Result<Completion, Failed>) {
        let mut tallies = self.tallies.lock().unwrap_or_else(PoisonError::into_inner);
        let tally = tallies.entry(kind.name).or_default();
        match outcome {
            Ok(Completion::Completed) => tally.passed += 1,
            Ok(Completion::Ignored { reason }) => {
                let reason = reason.clone().unwrap_or_else(|| "no reason given".to_owned());
                *tally.skipped.entry(reason).or_default() += 1;
            }
            Err(_) => tally.failed += 1,
        }
    }

    /// One line an engine, and one below it for each reason to skip.
    pub(crate) fn print(&self) {
        let tallies = self.tallies.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut ran, mut skips) = (0, 0);
        println!("{:<18}{:>5}{:>8}{:>9}  VERSIONS", "ENGINE", "RAN", "FAILED", "SKIPPED");
        for kind in &ENGINES {
            let Some(tally) = tallies.get(kind.name) else { continue };
            let skipped: u32 = tally.skipped.values().sum();
            let run = tally.passed + tally.failed;
            println!("{:<18}{run:>5}{:>8}{skipped:>9}  {}", kind.name, tally.failed, kind.versions());
            for (reason, count) in &tally.skipped {
                println!("    {count} skipped: {reason}");
            }
            ran += run;
            skips += skipped;
        }
        println!(
            "{ran} tests ran on {} engines, {skips} were skipped",
            tallies.values().filter(|t| t.passed + t.failed > 0).count()
        );
    }
}
