//! What `oci-mps-runtime create` adds to bare `runc create`, with and without annotations, in one paired run.
//!
//!     install/build && cargo bench --bench create -- [--runs N] [--raw FILE]
//!
//! The program measured is `OCI_MPS_RUNTIME`, else the one that is shipped, target/dist/oci-mps-runtime, where it was
//! built; else cargo's own.
//! Each round creates one container of each kind, in turn, and deletes it outside of the measurement. Counted is the
//! whole process with all that it waited for: the control program and the hook too. Needs root, runc, busybox and an
//! MPS control program (`MPS_CONTROL`, else what `tests/engines/prepare` unpacked, else the installed one).

mod machine;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use serde_json::{Value, json};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// As it is shipped: linked statically.
const SHIPPED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/dist/oci-mps-runtime");

/// One way of creating a container.
struct Kind<'a> {
    name: &'static str,
    runtime: &'a str,
    annotations: Value,
}

/// What one `create` took.
#[derive(Clone, Copy)]
struct Cost {
    cpu: Duration,
    wall: Duration,
}

fn main() -> Result<()> {
    let mut runs = 60;
    let mut raw = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--runs" => runs = arguments.next().ok_or("--runs N")?.parse()?,
            "--raw" => raw = arguments.next().map(PathBuf::from),
            "--bench" => {}
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let named = std::env::var("OCI_MPS_RUNTIME").ok();
    let built = if Path::new(SHIPPED).exists() { SHIPPED } else { env!("CARGO_BIN_EXE_oci-mps-runtime") };
    let runtime = named.as_deref().unwrap_or(built);
    println!("measuring {runtime}");
    let kinds = [
        Kind { name: "runc", runtime: "runc", annotations: json!({}) },
        Kind { name: "oci-mps, no annotation", runtime, annotations: json!({}) },
        Kind {
            name: "oci-mps, annotated",
            runtime,
            annotations: json!({"oci-mps/memory": "1GiB", "oci-mps/threads": "10"}),
        },
    ];
    let directory = tempfile::Builder::new().prefix("oci-mps-bench-").tempdir_in("/tmp")?;
    let host = Host::new(directory.path())?;
    let mut costs: Vec<Vec<Cost>> = kinds.iter().map(|_| Vec::new()).collect();
    for round in 0..runs + 3 {
        for (kind, costs) in kinds.iter().zip(&mut costs) {
            let cost = host.create(kind)?;
            // the first rounds start the daemon and warm the caches
            if round >= 3 {
                costs.push(cost);
            }
        }
    }
    report(&kinds, &costs);
    if let Some(raw) = raw {
        fs::write(raw, serde_json::to_vec_pretty(&as_value(&kinds, &costs))?)?;
    }
    Ok(())
}

/// A host with two simulated GPUs and a daemon of its own.
struct Host {
    directory: PathBuf,
}

impl Host {
    fn new(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory.join("bundle/rootfs/bin"))?;
        fs::copy("/usr/bin/busybox", directory.join("bundle/rootfs/bin/busybox"))?;
        let control = machine::control_program();
        let inventory = directory.join("gpus.toml");
        fs::write(
            directory.join("config.toml"),
            format!(
                "[daemon]\ncontrol = \"{}\"\n[inventory]\nsource = \"file\"\nfile = \"{}\"\n",
                control.display(),
                inventory.display()
            ),
        )?;
        let gpus = (0..2).map(|index| {
            format!(
                "[[gpu]]\nindex = {index}\nuuid = \"GPU-0000000{index}-0000-0000-0000-000000000000\"\nname = \"NVIDIA \
                 H200\"\nmemory_mib = 143771\ncompute_capability = \"9.0\"\nsms = 132\n"
            )
        });
        fs::write(&inventory, gpus.collect::<String>())?;
        Ok(Self { directory: directory.to_owned() })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("OCI_MPS_STATE_DIR", self.directory.join("state"))
            .env("OCI_MPS_CONFIG", self.directory.join("config.toml"))
            .arg("--root")
            .arg(self.directory.join("runc"))
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    }

    fn create(&self, kind: &Kind<'_>) -> Result<Cost> {
        let bundle = self.directory.join("bundle");
        fs::write(bundle.join("config.json"), serde_json::to_vec(&spec(&kind.annotations))?)?;
        let mut create = self.command(kind.runtime);
        create.args(["create", "--bundle"]).arg(&bundle).arg("bench");
        let (cpu, start) = (cpu_of_children()?, Instant::now());
        let status = create.status()?;
        let cost = Cost { wall: start.elapsed(), cpu: cpu_of_children()?.saturating_sub(cpu) };
        self.command("runc").args(["delete", "--force", "bench"]).status()?;
        if status.success() {
            Ok(cost)
        } else {
            Err(format!("{} could not create a container", kind.name).into())
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let pid = fs::read_to_string(self.directory.join("state/pipe/nvidia-cuda-mps-control.pid"));
        if let Some(pid) = pid.ok().and_then(|pid| pid.trim().parse().ok()) {
            let _ =
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
    }
}

fn spec(annotations: &Value) -> Value {
    json!({
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["/bin/busybox", "true"],
                    "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]},
        "root": {"path": "rootfs"},
        "annotations": annotations,
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"},
                   {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                   {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev"]}],
        "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]},
    })
}

fn cpu_of_children() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let duration = |time: nix::sys::time::TimeVal| {
        Duration::new(time.tv_sec().unsigned_abs(), u32::try_from(time.tv_usec()).unwrap_or(0) * 1000)
    };
    Ok(duration(usage.user_time()) + duration(usage.system_time()))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

fn report(kinds: &[Kind<'_>], costs: &[Vec<Cost>]) {
    println!(
        "{:<26}{:>9}{:>9}{:>12}{:>12}",
        "create, medians in ms", "CPU", "wall", "CPU added", "wall added"
    );
    for (kind, own) in kinds.iter().zip(costs) {
        let added = |of: fn(&Cost) -> Duration| {
            median(
                own.iter().zip(&costs[0]).map(|(own, bare)| milliseconds(of(own)) - milliseconds(of(bare))),
            )
        };
        println!(
            "{:<26}{:>9.2}{:>9.2}{:>12.2}{:>12.2}",
            kind.name,
            median(own.iter().map(|cost| milliseconds(cost.cpu))),
            median(own.iter().map(|cost| milliseconds(cost.wall))),
            added(|cost| cost.cpu),
            added(|cost| cost.wall),
        );
    }
    println!("{} rounds; added: the median of the differences within a round", costs[0].len());
}

fn as_value(kinds: &[Kind<'_>], costs: &[Vec<Cost>]) -> Value {
    let rows = kinds.iter().zip(costs).map(|(kind, costs)| {
        let column =
            |of: fn(&Cost) -> Duration| costs.iter().map(|c| milliseconds(of(c))).collect::<Vec<_>>();
        json!({"kind": kind.name, "cpu_ms": column(|c| c.cpu), "wall_ms": column(|c| c.wall)})
    });
    json!({"command": "cargo bench --bench create", "rows": rows.collect::<Vec<_>>()})
}
