//! `podman build` beside the hook. A precreate hook in podman's own directory breaks it; ours is elsewhere.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::Case;
use crate::container::{Container, QUARTER};
use crate::engine::{Session, within_mounts};
use crate::host::Host;
use crate::machine::MACHINE;

/// As this repository installs it.
const DROP_IN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/hooks/podman/50-oci-mps.conf");

pub(super) fn cases() -> Vec<Case> {
    let on = &["podman-precreate"];
    vec![
        Case::only(on, "the_drop_in_leads_podman_run_to_the_hook", run_with_the_drop_in),
        Case::only(on, "podman_build_works_beside_the_drop_in", build_with_the_drop_in),
        Case::only(
            on,
            "podman_build_breaks_with_the_hook_in_podmans_own_directory",
            build_with_the_hook_in_its_way,
        ),
    ]
}

/// The drop-in, with a directory of ours in the place of the one in `/etc`.
fn drop_in(host: &Host) -> PathBuf {
    let text = fs::read_to_string(DROP_IN).expect("the repository's drop-in");
    let ours = "/etc/oci-mps/hooks.d";
    assert!(text.contains(ours) && text.contains("/usr/share/containers/oci/hooks.d"), "{text}");
    let path = host.path().join("50-oci-mps.conf");
    fs::write(&path, text.replace(ours, &host.path().join("hooks").to_string_lossy())).unwrap();
    path
}

/// podman with that configuration and without `--hooks-dir`.
fn podman(host: &Host, arguments: &[&str]) -> Command {
    let mut podman = Command::new(MACHINE.path("PODMAN"));
    podman.env("CONTAINERS_CONF", drop_in(host));
    podman.arg("--root").arg(host.path().join("podman/root"));
    podman.arg("--runroot").arg(host.path().join("podman/run"));
    podman.args(["--storage-driver", "overlay", "--cgroup-manager", "cgroupfs", "--events-backend", "none"]);
    podman.arg("--runtime").arg(host.runtime()).args(arguments);
    podman
}

fn build(host: &Host) -> Command {
    let context = host.path().join("context");
    fs::create_dir_all(&context).unwrap();
    fs::write(context.join("Containerfile"), format!("FROM {}\nRUN echo built\n", MACHINE.image())).unwrap();
    let mut build = podman(host, &["build", "--network", "none", "--isolation", "oci", "--no-cache"]);
    build.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000", "--cgroup-parent"]);
    // buildah's container is in that very cgroup, which therefore must not have others in it
    build.arg(format!("/{}/build", host.name())).arg(context);
    build
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn run_with_the_drop_in(session: &mut Session) {
    let container = Container::probe().with(&QUARTER);
    let cgroups = format!("/{}", session.host.name());
    let mut run =
        podman(&session.host, &["run", "--rm", "--network", "none", "--ulimit", "nofile=1024:1024"]);
    run.args(["--ulimit", "nproc=1000:1000", "--cgroup-parent", &cgroups]);
    for (key, value) in &container.annotations {
        run.args(["--annotation", &format!("{key}={value}")]);
    }
    let output = run.arg(MACHINE.image()).args(&container.command).output().unwrap();
    assert!(said(&output).contains("{\"cuInit\":805}"), "{}", said(&output));
}

fn build_with_the_drop_in(session: &mut Session) {
    let output = build(&session.host).output().unwrap();
    assert!(output.status.success() && said(&output).contains("built"), "{}", said(&output));
}

fn build_with_the_hook_in_its_way(session: &mut Session) {
    let usual = "/usr/share/containers/oci/hooks.d";
    assert!(Path::new("/usr/share").is_dir());
    let script = format!(
        "mount -t tmpfs tmpfs /usr/share/containers\nmkdir -p {usual}\ncp {}/* {usual}/",
        session.host.path().join("hooks").display()
    );
    let output = within_mounts(&script, &build(&session.host)).output().unwrap();
    assert!(
        !output.status.success(),
        "podman has learnt it: the directory of our own is not needed any more"
    );
    assert!(said(&output).contains("precreate"), "{}", said(&output));
}
