//! What is broken around a container: a clear error within five seconds, and nothing lost.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::Case;
use super::refusal::assert_refused;
use super::share::Holder;
use crate::container::{Container, QUARTER};
use crate::engine::Session;
use crate::host::Settings;
use crate::processes;

/// One engine for each way in: the hook, the runtime, the shim.
const WAYS_IN: &[&str] = &["runc", "podman-precreate", "podman-runtime", "nerdctl-runtime", "nerdctl-shim"];

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::every("a_daemon_that_hangs_is_a_clear_error_within_five_seconds", a_daemon_that_hangs),
        Case::only(WAYS_IN, "a_daemon_that_was_killed_is_started_anew", a_daemon_that_was_killed),
        Case::only(WAYS_IN, "a_configuration_that_is_a_directory_is_refused", configuration_is_a_directory),
        Case::only(
            &["podman-rootless"],
            "a_configuration_that_its_user_may_not_read_is_refused",
            configuration_is_not_readable,
        ),
        Case::only(
            WAYS_IN,
            "a_configuration_with_a_mistake_is_refused_with_its_line",
            configuration_with_a_mistake,
        ),
        Case::only(WAYS_IN, "who_does_not_ask_never_notices_a_broken_configuration", who_does_not_ask),
        Case::only(WAYS_IN, "an_inventory_that_is_missing_is_refused", no_inventory),
        Case::only(WAYS_IN, "a_control_program_that_is_missing_is_refused", no_control_program),
        Case::only(WAYS_IN, "a_service_that_does_not_run_is_refused", no_service),
        Case::only(WAYS_IN, "a_ledger_that_is_damaged_is_refused", ledger_is_damaged),
        Case::only(WAYS_IN, "a_state_directory_that_others_can_write_is_refused", state_of_everybody),
    ]
}

fn quarter() -> Container {
    Container::probe().with(&QUARTER)
}

fn a_daemon_that_hangs(session: &mut Session) {
    let holder = Holder::start(session, &QUARTER);
    let daemon = session.host.daemon().expect("a daemon");
    let shares = session.host.shares();
    processes::send(daemon, Signal::SIGSTOP);
    let begun = Instant::now();
    assert_refused(session, &quarter(), "the MPS control daemon does not answer", "see which with 'ss -xp");
    let took = begun.elapsed();
    processes::send(daemon, Signal::SIGCONT);
    assert!(took < Duration::from_secs(5), "it took {took:.1?}");
    assert_eq!(session.host.shares(), shares, "who had a share still has it");
    assert_eq!(session.run(&quarter()).cu_init(), 805, "once it goes on, all is well");
    assert_eq!(session.host.daemon(), Some(daemon), "the daemon that hung was not replaced");
    assert_eq!(holder.end().output(), "ended");
}

fn a_daemon_that_was_killed(session: &mut Session) {
    assert_eq!(session.run(&quarter()).cu_init(), 805);
    session.host.end_daemon();
    assert_eq!(session.run(&quarter()).cu_init(), 805, "all its files were still there");
}

fn configuration_is_a_directory(session: &mut Session) {
    fs::remove_file(session.host.config()).unwrap();
    fs::create_dir(session.host.config()).unwrap();
    assert_refused(session, &quarter(), "config.toml: is a directory", "OCI_MPS_CONFIG");
}

fn configuration_is_not_readable(session: &mut Session) {
    fs::set_permissions(session.host.config(), fs::Permissions::from_mode(0o600)).unwrap();
    assert_refused(session, &quarter(), "config.toml: Permission denied", "OCI_MPS_CONFIG");
    fs::set_permissions(session.host.config(), fs::Permissions::from_mode(0o644)).unwrap();
}

fn configuration_with_a_mistake(session: &mut Session) {
    session.host.configure(&Settings { more: "[policy]\nslicez = 4\n", ..Settings::default() });
    assert_refused(
        session,
        &quarter(),
        "config.toml is not understood: TOML parse error at line 10",
        "unknown field `slicez`",
    );
}

fn who_does_not_ask(session: &mut Session) {
    session.host.configure(&Settings { more: "[policy]\nslicez = 4\n", ..Settings::default() });
    assert_eq!(session.run(&Container::probe()).cu_init(), 100);
}

fn no_inventory(session: &mut Session) {
    fs::remove_file(session.host.gpus()).unwrap();
    assert_refused(session, &quarter(), "cannot read the GPUs from", "write them there");
}

fn no_control_program(session: &mut Session) {
    session.host.configure(&Settings { control: Some("/no/such/control".into()), ..Settings::default() });
    assert_refused(
        session,
        &quarter(),
        "there is no MPS control program /no/such/control",
        "[daemon] control",
    );
}

fn no_service(session: &mut Session) {
    session.host.configure(&Settings { service: true, ..Settings::default() });
    assert_refused(session, &quarter(), "the MPS control daemon does not run", "oci-mps up");
    assert!(session.host.daemon().is_none(), "it is not ours to start");
}

fn ledger_is_damaged(session: &mut Session) {
    assert_eq!(session.run(&quarter()).cu_init(), 805);
    let ledger = session.host.state().join("shares.json");
    fs::write(&ledger, "{\"boot\":").unwrap();
    assert_refused(session, &quarter(), "shares.json is damaged", "it can be removed");
    assert_eq!(fs::read_to_string(&ledger).unwrap(), "{\"boot\":", "what might still be mended is kept");
    fs::remove_file(ledger).unwrap();
    assert_eq!(session.run(&quarter()).cu_init(), 805, "the way out is one");
}

fn state_of_everybody(session: &mut Session) {
    fs::create_dir_all(session.host.state()).unwrap();
    fs::set_permissions(session.host.state(), fs::Permissions::from_mode(0o777)).unwrap();
    assert_refused(session, &quarter(), "can be written by others (mode 0777)", "make it yours alone");
}
