//! A share, from the container's start to its end.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::Case;
use crate::container::{Container, Outcome, QUARTER};
use crate::engine::{Running, Session};
use crate::host::GPUS;
use crate::processes;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::every("a_share_is_held_while_the_container_runs_and_then_given_back", held_and_given_back),
        Case::every("a_killed_container_gives_its_share_back", killed),
        Case::every("a_container_whose_program_is_missing_gives_its_share_back", no_such_program),
    ]
}

/// A container that runs until it is told to end.
pub(super) struct Holder {
    running: Option<Running>,
    /// Seen by both sides.
    shared: PathBuf,
}

impl Holder {
    pub(super) fn start(session: &mut Session, annotations: &[(&str, &str)]) -> Self {
        static HOLDERS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = HOLDERS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let shared = session.host.path().join(format!("shared.{number}"));
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o777)).unwrap();
        // the host's name for it is an argument, so that the host finds the process
        let script = format!(
            ": {}; touch /shared/here; until [ -e /shared/end ]; do sleep 0.05; done; echo ended",
            shared.display()
        );
        let container = Container::shell(&script).with(annotations).mount(&shared, "/shared");
        let mut running = session.start(&container);
        let begun = Instant::now();
        while !shared.join("here").exists() {
            let given_up = running.has_ended() || begun.elapsed() > Duration::from_secs(15);
            assert!(!given_up, "the container did not come to life: {}", running.wait(Duration::ZERO));
            thread::sleep(Duration::from_millis(10));
        }
        Self { running: Some(running), shared }
    }

    /// Lets it end by itself.
    pub(super) fn end(mut self) -> Outcome {
        fs::write(self.shared.join("end"), "").unwrap();
        self.wait()
    }

    fn wait(&mut self) -> Outcome {
        let running = self.running.take().expect("it is waited for once");
        running.wait(Duration::from_secs(15))
    }

    /// Kills the container's own process.
    fn kill(mut self) -> Outcome {
        let is_its =
            |process: &processes::Process| process.mentions(&self.shared) && process.is_a_containers_first();
        let inner = processes::find(is_its);
        assert_eq!(inner.len(), 1, "one process of the container's");
        processes::send(inner[0].pid, Signal::SIGKILL);
        self.wait()
    }
}

impl Drop for Holder {
    /// A test that failed meanwhile leaves no container behind.
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            let _ = fs::write(self.shared.join("end"), "");
            running.wait(Duration::from_secs(5));
        }
    }
}

fn held_and_given_back(session: &mut Session) {
    let holder = Holder::start(session, &QUARTER);
    let shares = session.host.shares();
    assert_eq!(shares.len(), 1, "{shares:?}");
    assert_eq!(shares[0]["state"], "attached");
    assert_eq!(shares[0]["gpus"][0]["memory_mib"].to_string(), "8192");
    assert_eq!(shares[0]["gpus"][0]["gpu"], GPUS[0]);
    assert!(!shares[0]["id"].as_str().unwrap_or_default().is_empty(), "{shares:?}");
    let table = session.host.oci_mps(&["shares"]);
    assert!(table.contains("8,192/143,771 MiB"), "{table}");

    let greedy = [("oci-mps/memory", "140000MiB"), ("oci-mps/gpu", "0")];
    let refused = session.run(&Container::probe().with(&greedy));
    assert!(!refused.status.success(), "{refused}");
    let told = session.told(&refused);
    assert!(told.contains("GPU 0 (NVIDIA H200) has 135,067 MiB left to share"), "{told}");
    assert_eq!(session.host.shares(), shares, "a refusal changes nobody's share");

    let outcome = holder.end();
    assert_eq!(outcome.output(), "ended");
    given_back(session);
    let outcome = session.run(&Container::probe().with(&greedy));
    assert_eq!(outcome.cu_init(), 805, "its place is free again: {outcome}");
}

fn killed(session: &mut Session) {
    let holder = Holder::start(session, &QUARTER);
    let outcome = holder.kill();
    assert!(!outcome.status.success(), "{outcome}");
    given_back(session);
}

/// By the container's own hook, and not only once somebody else needs the room.
fn given_back(session: &Session) {
    let is_gone = || session.host.records() == Some(0);
    assert!(
        processes::wait_for(Duration::from_secs(2), is_gone),
        "a record stays: {:?}",
        session.host.records()
    );
}

fn no_such_program(session: &mut Session) {
    let container = Container { command: vec!["/no/such/program".to_owned()], ..Container::default() };
    let outcome = session.run(&container.with(&QUARTER));
    assert!(!outcome.status.success(), "{outcome}");
    assert!(outcome.config.is_some(), "the engine gave up before the runtime was asked: {outcome}");
}
