//! containerd of our own, asked by ctr or nerdctl, with oci-mps-runtime as its runc or with our shim.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Engine;
use super::mounts::{with_message_queues, within_mounts};
use crate::container::Container;
use crate::host::Host;
use crate::machine::{MACHINE, version};
use crate::processes;

/// How a container is said to be ours.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// By the path of oci-mps-runtime.
    Runtime,
    /// By `io.containerd.mps.v2`.
    Shim,
}

struct Containerd {
    process: Child,
    client: Client,
    way: Way,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Client {
    Ctr(&'static str),
    Nerdctl,
}

pub(super) fn ctr(host: &mut Host) -> Result<Box<dyn Engine>> {
    Containerd::open(host, "CONTAINERD", Client::Ctr("CTR"), Way::Runtime)
}

pub(super) fn nerdctl_runtime(host: &mut Host) -> Result<Box<dyn Engine>> {
    Containerd::open(host, "CONTAINERD", Client::Nerdctl, Way::Runtime)
}

pub(super) fn nerdctl_shim(host: &mut Host) -> Result<Box<dyn Engine>> {
    Containerd::open(host, "CONTAINERD", Client::Nerdctl, Way::Shim)
}

pub(super) fn ctr2_runtime(host: &mut Host) -> Result<Box<dyn Engine>> {
    Containerd::open(host, "CONTAINERD2", Client::Ctr("CTR2"), Way::Runtime)
}

pub(super) fn nerdctl2_shim(host: &mut Host) -> Result<Box<dyn Engine>> {
    Containerd::open(host, "CONTAINERD2", Client::Nerdctl, Way::Shim)
}

pub(super) fn ctr2_shim(host: &mut Host) -> Result<Box<dyn Engine>> {
    Containerd::open(host, "CONTAINERD2", Client::Ctr("CTR2"), Way::Shim)
}

impl Containerd {
    fn open(host: &Host, key: &str, client: Client, way: Way) -> Result<Box<dyn Engine>> {
        host.wrapper("oci-mps-runtime")?;
        let program = MACHINE.path(key);
        fs::write(
            host.path().join("containerd.toml"),
            configuration(host, version(program).starts_with("1.")),
        )?;
        let log = File::create(host.path().join("containerd.log"))?;
        // whoever fails leaves something in /run/containerd, which no configuration moves: it gets one of its own
        let mut containerd = Command::new(program);
        containerd.arg("-c").arg(host.path().join("containerd.toml"));
        let mut mounts = "mkdir -p /run/containerd\nmount -t tmpfs tmpfs /run/containerd".to_owned();
        if client == Client::Nerdctl {
            mounts = format!("{}\n{mounts}", with_message_queues(host));
        }
        let process = within_mounts(&mounts, &containerd)
            .env("PATH", search_path(host, key)?)
            .envs(host.variables())
            .current_dir(host.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("starting containerd")?;
        let mut containerd = Self { process, client, way };
        if let Err(error) = containerd.load(host) {
            containerd.close(host);
            let log = fs::read_to_string(host.path().join("containerd.log")).unwrap_or_default();
            return Err(error.context(log));
        }
        Ok(Box::new(containerd))
    }

    fn load(&self, host: &Host) -> Result<()> {
        let answers =
            || self.client(host).arg("version").output().is_ok_and(|output| output.status.success());
        ensure!(processes::wait_for(Duration::from_secs(10), answers), "containerd does not answer");
        let mut load = self.client(host);
        match self.client {
            Client::Ctr("CTR2") => load.args(["images", "import", "--local"]).arg(MACHINE.path("IMAGE_TAR")),
            Client::Ctr(_) => load.args(["images", "import"]).arg(MACHINE.path("IMAGE_TAR")),
            Client::Nerdctl => load.args(["load", "-i"]).arg(MACHINE.path("IMAGE_TAR")),
        };
        let load = load.output()?;
        ensure!(load.status.success(), "loading the image: {}", String::from_utf8_lossy(&load.stderr));
        Ok(())
    }

    /// A program that sees the mounts that containerd sees.
    fn beside(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.process.id())).arg(program);
        command
    }

    fn client(&self, host: &Host) -> Command {
        let socket = host.path().join("c.sock");
        match self.client {
            Client::Ctr(key) => {
                let mut ctr = self.beside(MACHINE.path(key));
                ctr.arg("-a").arg(socket).args(["-n", &host.name()]);
                ctr
            }
            Client::Nerdctl => {
                let mut nerdctl = self.beside(MACHINE.path("NERDCTL"));
                nerdctl.arg("--address").arg(socket).args(["--namespace", &host.name()]);
                nerdctl.arg("--data-root").arg(host.path().join("nerdctl"));
                nerdctl.args(["--cgroup-manager", "cgroupfs", "--cni-path", "/nonexistent"]);
                nerdctl.arg("--cni-netconfpath").arg(host.path().join("cni"));
                nerdctl
            }
        }
    }

    fn ctr_run(&self, host: &Host, id: &str, container: &Container) -> Command {
        let mut ctr = self.client(host);
        ctr.args(["run", "--rm"]);
        match self.way {
            Way::Runtime => ctr.arg("--runc-binary").arg(host.path().join("wrap-oci-mps-runtime")),
            Way::Shim => ctr.args(["--runtime", "io.containerd.mps.v2"]),
        };
        for (key, value) in &container.annotations {
            ctr.args(["--annotation", &format!("{key}={value}")]);
        }
        for variable in &container.env {
            ctr.args(["--env", variable]);
        }
        for (source, destination) in &container.mounts {
            let mount = format!("type=bind,src={},dst={destination},options=rbind:rw", source.display());
            ctr.args(["--mount", &mount]);
        }
        if let Some(user) = container.user {
            ctr.args(["--user", &user.to_string()]);
        }
        if let Some(path) = &container.ipc_of {
            ctr.args(["--with-ns", &format!("ipc:{}", path.display())]);
        }
        ctr.arg(MACHINE.image()).arg(id).args(&container.command);
        ctr
    }

    fn nerdctl_run(&self, host: &Host, id: &str, container: &Container) -> Command {
        let mut nerdctl = self.client(host);
        nerdctl.args([
            "run",
            if container.detached { "--detach" } else { "--rm" },
            "--name",
            id,
            "--network",
            "none",
            "--runtime",
        ]);
        match self.way {
            Way::Runtime => nerdctl.arg(host.path().join("wrap-oci-mps-runtime")),
            Way::Shim => nerdctl.arg("io.containerd.mps.v2"),
        };
        // nerdctl 1.x makes every label an annotation too
        for (key, value) in &container.annotations {
            nerdctl.args(["--label", &format!("{key}={value}")]);
        }
        for variable in &container.env {
            nerdctl.args(["--env", variable]);
        }
        for (source, destination) in &container.mounts {
            nerdctl.args(["--volume", &format!("{}:{destination}", source.display())]);
        }
        if let Some((name, value)) = &container.sysctl {
            nerdctl.args(["--sysctl", &format!("{name}={value}")]);
        }
        if let Some(user) = container.user {
            nerdctl.args(["--user", &user.to_string()]);
        }
        if container.ipc_host {
            nerdctl.args(["--ipc", "host"]);
        }
        nerdctl.arg(MACHINE.image()).args(&container.command);
        nerdctl
    }
}

/// Where containerd finds its shims: ours, then the real one.
fn search_path(host: &Host, key: &str) -> Result<std::ffi::OsString> {
    let beside = MACHINE.path(key).parent().map(Path::to_owned).context("a program lies in a directory")?;
    let inherited = std::env::var_os("PATH").unwrap_or_default();
    let ours = [host.path().join("programs"), beside, PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")];
    Ok(std::env::join_paths(ours.into_iter().chain(std::env::split_paths(&inherited)))?)
}

fn configuration(host: &Host, is_first: bool) -> String {
    let (number, disabled): (_, &[&str]) = if is_first {
        (2, &["grpc.v1.cri", "snapshotter.v1.aufs"])
    } else {
        (
            3,
            &[
                "grpc.v1.cri",
                "cri.v1.images",
                "cri.v1.runtime",
                "nri.v1.nri",
                "snapshotter.v1.erofs",
                "snapshotter.v1.blockfile",
            ],
        )
    };
    let everywhere = ["snapshotter.v1.btrfs", "snapshotter.v1.zfs", "snapshotter.v1.devmapper"];
    let disabled = disabled.iter().chain(&everywhere).map(|plugin| format!("io.containerd.{plugin}"));
    let path = host.path().display();
    format!(
        "version = {number}\nroot = \"{path}/containerd/root\"\nstate = \"{path}/containerd/state\"\noom_score = 0\n\
         disabled_plugins = {:?}\n[grpc]\naddress = \"{path}/c.sock\"\n[ttrpc]\naddress = \"{path}/c.sock.ttrpc\"\n",
        disabled.collect::<Vec<_>>()
    )
}

impl Engine for Containerd {
    fn command(&self, host: &Host, id: &str, container: &Container) -> Result<Command> {
        Ok(match self.client {
            Client::Ctr(_) => self.ctr_run(host, id, container),
            Client::Nerdctl => self.nerdctl_run(host, id, container),
        })
    }

    fn ask(&self, host: &Host, words: &[&str]) -> Result<Command> {
        let mut client = self.client(host);
        client.args(words);
        Ok(client)
    }

    fn cannot(&self, container: &Container) -> Option<&'static str> {
        match self.client {
            Client::Nerdctl if container.ipc_of.is_some() => {
                Some("nerdctl joins no IPC namespace by its path")
            }
            Client::Ctr(_) if container.sysctl.is_some() => Some("ctr cannot set a sysctl"),
            Client::Ctr(_) if container.ipc_host => Some("ctr has no --ipc=host"),
            Client::Ctr("CTR") if container.user.is_some() => Some("ctr 1.6 has no --user"),
            _ => None,
        }
    }

    fn close(&mut self, host: &Host) {
        // a shim outlives containerd, and its containers with it
        for process in processes::find(|process| {
            process.name().starts_with("containerd-shim") && process.mentions(host.path())
        }) {
            processes::kill_tree(process.pid);
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
