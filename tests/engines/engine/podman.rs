//! podman, by its precreate hook or with oci-mps-runtime, as root or not, on runc or crun.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::Engine;
use super::mounts::{on_pure_cgroup2, with_message_queues, within_mounts};
use crate::container::Container;
use crate::host::Host;
use crate::machine::MACHINE;
use crate::processes;

/// As this repository installs it.
const PRECREATE_HOOK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/hooks/podman/oci-mps-precreate.json");

/// Nobody on this machine.
const USER: u32 = 64_321;

struct Podman {
    way: Way,
    crun: bool,
    rootless: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Precreate,
    Runtime,
}

pub(super) fn precreate(host: &mut Host) -> Result<Box<dyn Engine>> {
    Podman { way: Way::Precreate, crun: false, rootless: false }.open(host)
}

pub(super) fn runtime(host: &mut Host) -> Result<Box<dyn Engine>> {
    Podman { way: Way::Runtime, crun: false, rootless: false }.open(host)
}

pub(super) fn crun(host: &mut Host) -> Result<Box<dyn Engine>> {
    Podman { way: Way::Precreate, crun: true, rootless: false }.open(host)
}

pub(super) fn rootless(host: &mut Host) -> Result<Box<dyn Engine>> {
    Podman { way: Way::Precreate, crun: false, rootless: true }.open(host)
}

impl Podman {
    fn open(self, host: &mut Host) -> Result<Box<dyn Engine>> {
        if self.crun {
            host.use_crun();
        }
        if self.rootless {
            become_known(host)?;
        }
        write_hook(host)?;
        let image = host.path().join("image.tar");
        fs::copy(MACHINE.path("IMAGE_TAR"), &image)?;
        let load = self.podman(host, |podman| {
            podman.args(["load", "-qi"]).arg(&image);
        });
        let load = { load }.output()?;
        ensure!(load.status.success(), "podman load: {}", String::from_utf8_lossy(&load.stderr));
        fs::remove_file(image)?;
        Ok(Box::new(self))
    }

    /// podman, wherever this one works.
    pub(crate) fn podman(&self, host: &Host, arguments: impl FnOnce(&mut Command)) -> Command {
        let mut podman = Command::new(MACHINE.path("PODMAN"));
        podman.arg("--root").arg(host.path().join("podman/root"));
        podman.arg("--runroot").arg(host.path().join("podman/run"));
        podman.args([
            "--storage-driver",
            "overlay",
            "--cgroup-manager",
            "cgroupfs",
            "--events-backend",
            "none",
        ]);
        let runtime = match self.way {
            Way::Precreate => host.runtime(),
            Way::Runtime => host.path().join("wrap-oci-mps-runtime"),
        };
        podman.arg("--runtime").arg(runtime);
        if self.way == Way::Precreate {
            podman.arg("--hooks-dir").arg(host.path().join("hooks"));
        }
        arguments(&mut podman);
        if self.rootless {
            as_user(host, &podman)
        } else if self.crun {
            on_pure_cgroup2(podman)
        } else {
            podman
        }
    }
}

/// The hook as it is installed, but for the program's path, and with the variables that podman would not hand on.
fn write_hook(host: &Host) -> Result<()> {
    let text = fs::read(PRECREATE_HOOK).with_context(|| format!("reading {PRECREATE_HOOK}"))?;
    let mut hook: serde_json::Value = serde_json::from_slice(&text)?;
    hook["hook"]["path"] = json!(host.wrapper("oci-mps")?);
    fs::create_dir(host.path().join("hooks"))?;
    fs::write(host.path().join("hooks/oci-mps.json"), serde_json::to_vec_pretty(&hook)?)?;
    host.wrapper("oci-mps-runtime")?;
    Ok(())
}

/// Writes down a user whom this machine does not know: podman needs a name and subordinate ids.
fn become_known(host: &mut Host) -> Result<()> {
    host.belong_to(USER)?;
    let home = host.path().join("home");
    fs::create_dir(&home)?;
    for directory in [&home, &host.path().join("podman"), &host.path().join("runtime-dir")] {
        fs::create_dir_all(directory)?;
        chown(directory, Some(USER), Some(USER))?;
    }
    let passwd = format!("oci-mps-test:x:{USER}:{USER}::{}:/bin/sh\n", home.display());
    for (file, line) in [
        ("passwd", passwd.as_str()),
        ("group", &format!("oci-mps-test:x:{USER}:\n")),
        ("subuid", "oci-mps-test:643210000:65536\n"),
        ("subgid", "oci-mps-test:643210000:65536\n"),
    ] {
        let known = fs::read_to_string(Path::new("/etc").join(file)).unwrap_or_default();
        fs::write(host.path().join(file), known + line)?;
    }
    Ok(())
}

/// The same command as that user, whom only it sees in `/etc`.
fn as_user(host: &Host, command: &Command) -> Command {
    let id = USER.to_string();
    let mut inner = Command::new("setpriv");
    inner.args(["--reuid", &id, "--regid", &id, "--clear-groups", "env", "-i"]);
    inner.arg("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    inner.arg(format!("HOME={}", host.path().join("home").display()));
    inner.arg(format!("XDG_RUNTIME_DIR={}", host.path().join("runtime-dir").display()));
    inner.arg(command.get_program()).args(command.get_args());
    let bind = |file| format!("mount --bind {}/{file} /etc/{file}", host.path().display());
    let script = ["passwd", "group", "subuid", "subgid"].map(bind).join("\n");
    let mut command = within_mounts(&format!("{}\n{script}", with_message_queues(host)), &inner);
    command.current_dir(host.path());
    command
}

impl Engine for Podman {
    fn command(&self, host: &Host, id: &str, container: &Container) -> Result<Command> {
        Ok(self.podman(host, |podman| {
            podman.args([
                "run",
                if container.detached { "--detach" } else { "--rm" },
                "--name",
                id,
                "--network",
                "none",
            ]);
            // podman asks for more than an unprivileged machine may give
            podman.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000"]);
            if self.crun {
                podman.args(["--cgroups", "disabled"]);
            } else if !self.rootless {
                podman.args(["--cgroup-parent", &format!("/{}", host.name())]);
            }
            if let Some(retries) = container.retries {
                podman.args(["--restart", &format!("on-failure:{retries}")]);
            }
            for (key, value) in &container.annotations {
                // before 4.4 podman takes a comma for the end of the annotation, but in quotes
                let annotation = format!("{key}={value}");
                let quoted = format!("\"{annotation}\"");
                podman.args(["--annotation", if value.contains(',') { &quoted } else { &annotation }]);
            }
            for variable in &container.env {
                podman.args(["--env", variable]);
            }
            for (source, destination) in &container.mounts {
                podman.args(["--volume", &format!("{}:{destination}", source.display())]);
            }
            if let Some((name, value)) = &container.sysctl {
                podman.args(["--sysctl", &format!("{name}={value}")]);
            }
            if let Some(user) = container.user {
                podman.args(["--user", &user.to_string()]);
            }
            if container.user_namespace {
                podman.args(["--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536"]);
            }
            if container.ipc_host {
                podman.args(["--ipc", "host"]);
            }
            podman.arg(MACHINE.image()).args(&container.command);
        }))
    }

    fn ask(&self, host: &Host, words: &[&str]) -> Result<Command> {
        Ok(self.podman(host, |podman| {
            podman.args(words);
        }))
    }

    fn hides_messages(&self) -> bool {
        self.way == Way::Precreate
    }

    fn cannot(&self, container: &Container) -> Option<&'static str> {
        container.ipc_of.is_some().then_some("podman joins the namespaces of its own containers only")
    }

    fn close(&mut self, host: &Host) {
        let _ = self
            .podman(host, |podman| {
                podman.args(["rm", "--all", "--force", "--time", "0"]);
            })
            .output();
        for pid in pause_processes(host) {
            processes::kill(pid);
        }
        let store: PathBuf = host.path().join("podman/root/overlay");
        let _ = Command::new("umount").arg("-l").arg(store).output();
    }
}

/// Rootless podman keeps a process that holds its user namespace, and says so in the runtime directory.
fn pause_processes(host: &Host) -> Vec<i32> {
    let file = host.path().join("runtime-dir/libpod/tmp/pause.pid");
    fs::read_to_string(file).ok().and_then(|pid| pid.trim().parse().ok()).into_iter().collect()
}
