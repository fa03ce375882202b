//! What only whoever holds the bundle can do to a container.

use std::fs;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Case;
use super::full::Full;
use super::life::Life;
use crate::container::{Container, QUARTER};
use crate::engine::Session;
use crate::leftovers;
use crate::processes;

pub(super) fn cases() -> Vec<Case> {
    let on = &["runc"];
    vec![
        Case::only(on, "create_start_and_delete_are_one_container", create_start_delete),
        Case::only(on, "what_does_not_ask_stays_byte_for_byte", byte_for_byte),
        Case::only(on, "a_second_look_at_a_bundle_changes_nothing", a_second_look),
        Case::only(on, "broken_json_is_an_error_and_stays", broken_json),
        Case::only(on, "a_directory_instead_of_config_json_is_an_error", directory_instead),
        Case::only(on, "a_bundle_that_is_not_there_is_an_error", bundle_is_not_there),
        Case::only(on, "a_bundle_that_vanishes_loses_no_share", bundle_vanishes),
        Case::only(on, "a_full_disk_keeps_the_old_config_json_whole", full_disk),
        Case::only(on, "a_full_state_directory_promises_nothing", full_state),
        Case::only(on, "a_state_directory_with_too_long_a_path_is_refused", path_too_long),
        Case::only(on, "containers_at_once_never_get_more_than_there_is", at_once),
    ]
}

fn succeeded(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// What was said by a call that had to fail.
fn refused(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "it was not refused: {said}");
    said
}

fn forever() -> Container {
    Container::shell("sleep 60").with(&QUARTER)
}

fn create_start_delete(session: &mut Session) {
    let life = Life::new(session, "life", &forever());
    let states = || session.host.shares().into_iter().map(|share| share["state"].clone()).collect::<Vec<_>>();
    succeeded(&life.create());
    assert_eq!(states(), ["attached"], "a created container has its share");
    life.call(&["start"]);
    assert_eq!(states(), ["attached"]);
    let share = session.host.shares().remove(0);
    assert_eq!(share["process"]["pid"], life.state()["pid"]);
    let cgroup = share["cgroup"].as_str().unwrap_or_default().to_owned();
    assert!(cgroup.contains(&format!("{}/life", session.host.name())), "{cgroup:?}");
    life.call(&["delete", "--force"]);
    assert_eq!(states(), Vec::<Value>::new());
    assert!(session.host.daemon().is_some(), "the daemon is not the container's");
}

fn byte_for_byte(session: &mut Session) {
    let life =
        Life::new(session, "untouched", &Container::shell("true").with(&[("org.example/key", "value")]));
    let before = fs::read(life.spec()).unwrap();
    succeeded(&life.create());
    assert_eq!(fs::read(life.spec()).unwrap(), before);
    life.call(&["delete", "--force"]);
}

fn a_second_look(session: &mut Session) {
    let life = Life::new(session, "twice", &forever());
    succeeded(&life.create());
    life.call(&["delete", "--force"]);
    let once = fs::read(life.spec()).unwrap();
    succeeded(&life.create());
    assert_eq!(String::from_utf8(fs::read(life.spec()).unwrap()).unwrap(), String::from_utf8(once).unwrap());
    assert_eq!(session.host.shares().len(), 1);
    life.call(&["delete", "--force"]);
}

fn broken_json(session: &mut Session) {
    let life = Life::new(session, "broken", &forever());
    let whole = fs::read(life.spec()).unwrap();
    let half = &whole[..whole.len() / 2];
    let half = [half, b"\"oci-mps/memory\""].concat();
    fs::write(life.spec(), &half).unwrap();
    let said = refused(&life.create());
    assert!(said.contains("oci-mps: ") && said.contains("config.json is not JSON"), "{said}");
    assert_eq!(fs::read(life.spec()).unwrap(), half);
    assert_eq!(session.host.records(), Some(0));
}

fn directory_instead(session: &mut Session) {
    let life = Life::new(session, "directory", &forever());
    fs::remove_file(life.spec()).unwrap();
    fs::create_dir(life.spec()).unwrap();
    let said = refused(&life.create());
    assert!(said.contains("config.json") && said.contains("is a directory"), "{said}");
    assert!(life.spec().is_dir());
}

fn bundle_is_not_there(session: &mut Session) {
    let life = Life::new(session, "nowhere", &forever());
    fs::remove_dir_all(&life.bundle).unwrap();
    let said = refused(&life.create());
    assert!(
        said.contains("no such file or directory") || said.contains("No such file or directory"),
        "{said}"
    );
    assert!(!life.bundle.exists(), "nothing is made where nothing was");
    assert_eq!(session.host.records(), Some(0));
}

/// The engine's directory is gone while the container lives.
fn bundle_vanishes(session: &mut Session) {
    let life = Life::new(session, "vanishes", &forever());
    succeeded(&life.create());
    life.call(&["start"]);
    fs::remove_dir_all(&life.bundle).unwrap();
    assert_eq!(session.host.shares().len(), 1, "the container lives, so it keeps its share");
    life.call(&["delete", "--force"]);
    assert_eq!(session.host.shares().len(), 0);
}

fn full_disk(session: &mut Session) {
    let bundle = session.host.path().join("bundles/full");
    let disk = Full::mount(&bundle);
    let life = Life::new(session, "full", &forever());
    let before = fs::read(life.spec()).unwrap();
    disk.fill();
    let files = fs::read_dir(&bundle).unwrap().count();
    let said = refused(&life.create());
    assert!(said.contains("cannot write the edited config.json: No space left on device"), "{said}");
    assert_eq!(fs::read(life.spec()).unwrap(), before, "the old one, whole");
    assert_eq!(fs::read_dir(&bundle).unwrap().count(), files, "nothing beside it");
    assert_eq!(session.host.records(), Some(0), "what cannot be written is not promised");
}

fn full_state(session: &mut Session) {
    let state = session.host.state();
    fs::create_dir_all(&state).unwrap();
    let disk = Full::mount(&state);
    // the daemon and the first share fit
    assert_eq!(session.run(&Container::probe().with(&QUARTER)).cu_init(), 805);
    disk.fill();
    let life = Life::new(session, "promised", &forever());
    let before = fs::read(life.spec()).unwrap();
    let said = refused(&life.create());
    assert!(said.contains("shares.json") && said.contains("No space left on device"), "{said}");
    assert_eq!(fs::read(life.spec()).unwrap(), before);
    assert_eq!(session.host.records(), Some(0));
    session.host.end_daemon();
    drop(life);
    drop(disk);
    assert!(leftovers::mounts(&state).is_empty());
}

fn path_too_long(session: &mut Session) {
    let life = Life::new(session, "long", &forever());
    let state = session.host.path().join("s".repeat(100));
    let said = refused(&life.create_with(|command| {
        command.env("OCI_MPS_STATE_DIR", &state);
    }));
    assert!(said.contains("is too long") && said.contains("choose a shorter OCI_MPS_STATE_DIR"), "{said}");
    assert!(!state.join("shares.json").exists());
}

/// Eight ask for 60 GiB each, and two GPUs have room for four.
fn at_once(session: &mut Session) {
    let half = [("oci-mps/memory", "60GiB"), ("oci-mps/threads", "25")];
    let lives: Vec<Life<'_>> = (0..8)
        .map(|number| {
            Life::new(session, &format!("at-once-{number}"), &Container::shell("sleep 60").with(&half))
        })
        .collect();
    let begun = Instant::now();
    let children: Vec<_> = lives
        .iter()
        .map(|life| {
            let log = fs::File::create(session.host.path().join(format!("{}.log", life.id))).unwrap();
            let mut command = life.runtime(&["create", "--bundle"]);
            command.arg(&life.bundle).arg(&life.id).stdin(Stdio::null());
            command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
        })
        .collect();
    let started = children
        .into_iter()
        .map(|mut child| child.wait().unwrap().success())
        .filter(|started| *started)
        .count();
    let said = lives
        .iter()
        .map(|life| fs::read_to_string(session.host.path().join(format!("{}.log", life.id))).unwrap());
    let said: Vec<String> = said.filter(|text| !text.is_empty()).collect();
    assert_eq!(started, 4, "{said:?}");
    assert!(said.len() == 4 && said.iter().all(|text| text.contains("left to share")), "{said:?}");
    assert_eq!(session.host.shares().len(), 4);
    drop(lives);
    assert!(processes::wait_for(Duration::from_secs(2), || session.host.records() == Some(0)));
    assert!(begun.elapsed() < Duration::from_secs(20));
}
