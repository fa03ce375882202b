//! What being admitted costs where 480 others are in the ledger, and what becomes of 500 who come at once.
//!
//!     cargo bench --bench admission [-- [--runs N] [--at-once N] [--raw FILE]]
//!
//! Three measurements on 8 simulated GPUs of 60 client slots, in one run:
//!
//! 1. one admission and release in this process, its CPU and wall time, with 0, 100 and 480 records in the ledger;
//! 2. N processes that are let go at the same moment, each of which opens the ledger, decides and reserves: how long
//!    each waited for the lock;
//! 3. N processes of bare `runc create`, then N of `oci-mps-runtime create`, all at once: creates a second. Of those
//!    with a share exactly as many as there are slots are admitted, each slot once, and the rest is refused.
//!
//! Needs root, runc, busybox and an MPS control program, as benches/create.rs does.

mod machine;

use std::collections::BTreeSet;
use std::error::Error;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use oci_mps::config::HostConfig;
use oci_mps::gpu::Inventory;
use oci_mps::inventory;
use oci_mps::kernel::{self, Process};
use oci_mps::layout::{Layout, Owner};
use oci_mps::ledger::{Container, Ledger};
use oci_mps::origin::Origin;
use oci_mps::plan::{Facts, Site, plan};
use oci_mps::request::Request;
use oci_mps::share::Token;
use oci_mps::spec::Document;
use serde_json::{Value, json};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const RUNTIME: &str = env!("CARGO_BIN_EXE_oci-mps-runtime");
const GPUS: u32 = 8;
const SLOTS: u32 = 60;
const ASKS: [(&str, &str); 2] = [("oci-mps/memory", "2GiB"), ("oci-mps/threads", "5")];

fn main() -> Result<()> {
    let (mut runs, mut at_once, mut raw) = (200, 500, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--runs" => runs = arguments.next().ok_or("--runs N")?.parse()?,
            "--at-once" => at_once = arguments.next().ok_or("--at-once N")?.parse()?,
            "--raw" => raw = arguments.next().map(PathBuf::from),
            "--child" => return child(Path::new(&arguments.next().ok_or("--child DIRECTORY")?)),
            "--bench" => {}
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let directory = tempfile::Builder::new().prefix("oci-mps-bench-").tempdir_in("/tmp")?;
    let host = Host::new(directory.path())?;
    let _daemon = Daemon(&host);
    let admissions = [0, 100, 480].into_iter().map(|records| host.admissions(records, runs));
    let admissions = admissions.collect::<Result<Vec<_>>>()?;
    let waits = host.waits(at_once)?;
    let creates = host.creates(at_once)?;
    let report = json!({
        "command": "cargo bench --bench admission",
        "gpus": GPUS, "client_slots": SLOTS, "at_once": at_once,
        "admissions": admissions, "waits": waits, "creates": creates,
    });
    if let Some(raw) = raw {
        fs::write(raw, serde_json::to_vec(&report)?)?;
    }
    Ok(())
}

/// A host with eight simulated GPUs.
struct Host {
    directory: PathBuf,
    layout: Layout,
    config: HostConfig,
    inventory: Inventory,
}

impl Host {
    fn new(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory.join("state"))?;
        fs::create_dir_all(directory.join("rootfs/bin"))?;
        fs::copy("/usr/bin/busybox", directory.join("rootfs/bin/busybox"))?;
        let gpus = (0..GPUS).map(|index| {
            format!(
                "[[gpu]]\nindex = {index}\nuuid = \"GPU-0000000{index}-0000-0000-0000-000000000000\"\n\
                 name = \"NVIDIA H200\"\nmemory_mib = 143771\ncompute_capability = \"9.0\"\nsms = 132\n"
            )
        });
        let gpus: String = gpus.collect();
        fs::write(directory.join("gpus.toml"), format!("cuda = {{ major = 13, minor = 1 }}\n{gpus}"))?;
        let config = format!(
            "[daemon]\ncontrol = '{}'\n[inventory]\nsource = 'file'\nfile = '{}'\n",
            machine::control_program().display(),
            directory.join("gpus.toml").display()
        );
        fs::write(directory.join("config.toml"), config)?;
        Self::open(directory)
    }

    fn open(directory: &Path) -> Result<Self> {
        let named = |name: &str| match name {
            "OCI_MPS_STATE_DIR" => Some(directory.join("state").into()),
            "OCI_MPS_CONFIG" => Some(directory.join("config.toml").into()),
            _ => None,
        };
        let layout = Layout::new(Owner::Root, named);
        let config = HostConfig::load(layout.config())?;
        let inventory = inventory::current(&layout, &config, Path::new(""))?;
        Ok(Self { directory: directory.to_owned(), layout, config, inventory })
    }

    /// Everything that is done under the ledger's lock, as `inject` does it; how long the lock was waited for.
    fn admit(&self, document: &Document, holder: Process) -> Result<(Token, Duration)> {
        let token = Token::try_from(kernel::random_token()?)?;
        let mut book = Ledger::new(&self.layout).open()?;
        let request = Request::read(&ASKS, self.config.aliases)?.ok_or("it asks")?;
        let site = Site {
            client_dir: self.layout.client(),
            hook_program: RUNTIME.into(),
            hook_env: Vec::new(),
            has_message_queues: true,
            in_user_namespace: false,
        };
        let others = book.others(&token);
        let facts = Facts {
            config: &self.config,
            inventory: &self.inventory,
            others: &others,
            held: None,
            token: &token,
            site: &site,
        };
        let share = plan(document, &request, facts)?.share;
        let waited = book.waited();
        book.reserve(share, holder, None, Some(self.directory.join("config.toml")))?;
        Ok((token, waited))
    }

    /// CPU and wall time of one admission among so many records, each as large as containerd's are.
    fn admissions(&self, records: usize, runs: usize) -> Result<Value> {
        let _ = fs::remove_file(self.layout.shares());
        let document = Document::parse(&serde_json::to_vec(&spec(&self.directory, false))?)?;
        let this = Process::this()?;
        for n in 0..records {
            let (token, _) = self.admit(&document, this)?;
            let id = format!("{n:064x}");
            let bundle = format!("/run/containerd/io.containerd.runtime.v2.task/k8s.io/{id}").into();
            let cgroup = Some(format!("/kubepods/burstable/pod00000000-0000-0000-0000-000000000000/{id}"));
            let origin = Origin {
                engine: Some("containerd (CRI)".to_owned()),
                name: Some(format!("ml/train-{n}/main")),
                image: Some("registry.example.com/ml/train:2026-11".to_owned()),
            };
            Ledger::new(&self.layout)
                .open()?
                .attach(&token, Container { id, bundle, process: this, cgroup, origin })?;
        }
        // the last place is left to whoever is measured
        let full = records == (GPUS * SLOTS) as usize;
        if full {
            let path = self.layout.shares();
            let text = fs::read_to_string(&path)?;
            let token: Value =
                serde_json::from_str(text.lines().nth(1).ok_or("a record")?.trim_end_matches(','))?;
            let token = Token::try_from(token["share"]["token"].as_str().ok_or("a token")?.to_owned())?;
            Ledger::new(&self.layout).open()?.forget(&token)?;
        }
        let (mut cpu, mut wall) = (Vec::new(), Vec::new());
        for _ in 0..runs {
            let (before, begun) = (cpu_time(UsageWho::RUSAGE_SELF)?, Instant::now());
            let (token, _) = self.admit(&document, this)?;
            wall.push(milliseconds(begun.elapsed()));
            cpu.push(milliseconds(cpu_time(UsageWho::RUSAGE_SELF)?.saturating_sub(before)));
            Ledger::new(&self.layout).open()?.release(&token, None)?;
        }
        let size = fs::metadata(self.layout.shares())?.len();
        let _ = fs::remove_file(self.layout.shares());
        println!(
            "one admission among {records:>3}: CPU median {:.3} ms, 99th {:.3} ms; wall median {:.3} ms (ledger {size} bytes, {runs} runs)",
            quantile(&cpu, 0.5),
            quantile(&cpu, 0.99),
            quantile(&wall, 0.5),
        );
        Ok(json!({"records": records, "ledger_bytes": size, "cpu_ms": cpu, "wall_ms": wall}))
    }

    /// `count` processes at once, each of which is admitted and says how long it waited for the lock.
    fn waits(&self, count: usize) -> Result<Value> {
        let _ = fs::remove_file(self.layout.shares());
        let (gate, opener) = std::io::pipe()?;
        let mut children = Vec::new();
        for _ in 0..count {
            let mut child = Command::new(std::env::current_exe()?);
            child.arg("--child").arg(&self.directory).stdin(Stdio::from(gate.try_clone()?));
            children.push(child.stdout(Stdio::piped()).spawn()?);
        }
        // all of them wait for the pipe to be closed
        std::thread::sleep(Duration::from_millis(500));
        let begun = Instant::now();
        drop((gate, opener));
        let mut waits = Vec::new();
        let mut refused = 0;
        for child in &mut children {
            let mut said = String::new();
            child.stdout.take().ok_or("its output")?.read_to_string(&mut said)?;
            child.wait()?;
            match said.trim().parse::<f64>() {
                Ok(waited) => waits.push(waited),
                Err(_) => refused += 1,
            }
        }
        let took = begun.elapsed().as_secs_f64();
        self.assert_ledger(waits.len(), refused, count)?;
        println!(
            "{count} processes at once: {} admitted, {refused} refused in {took:.2} s; the lock was waited for {:.1} ms \
             (median), {:.1} ms (99th), {:.1} ms (longest)",
            waits.len(),
            quantile(&waits, 0.5),
            quantile(&waits, 0.99),
            quantile(&waits, 1.0),
        );
        let _ = fs::remove_file(self.layout.shares());
        Ok(json!({"admitted": waits.len(), "refused": refused, "seconds": took, "waited_ms": waits}))
    }

    /// `count` creates at once, bare and with a share.
    fn creates(&self, count: usize) -> Result<Value> {
        // the daemon is there, as on a host that shares already
        self.create(RUNTIME, 0, true)?.wait()?;
        self.delete(0..1)?;
        let mut rows = Vec::new();
        for (kind, program, asks) in [("runc", "runc", false), ("oci-mps, annotated", RUNTIME, true)] {
            let before = cpu_time(UsageWho::RUSAGE_CHILDREN)?;
            let begun = Instant::now();
            let children: Vec<Child> =
                (0..count).map(|n| self.create(program, n, asks)).collect::<Result<_>>()?;
            let mut done = 0;
            for mut child in children {
                done += usize::from(child.wait()?.success());
            }
            let took = begun.elapsed().as_secs_f64();
            let cpu = cpu_time(UsageWho::RUSAGE_CHILDREN)?.saturating_sub(before).as_secs_f64();
            if asks && let Err(error) = self.assert_ledger(done, count - done, count) {
                let said = (0..count)
                    .filter_map(|n| fs::read_to_string(self.directory.join(format!("bundles/{n}/log"))).ok());
                let said: BTreeSet<String> = said.collect();
                return Err(format!("{error}; {:#?}", said.iter().take(6).collect::<Vec<_>>()).into());
            }
            #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
            let rate = count as f64 / took;
            println!(
                "{count} creates at once, {kind}: {done} created, {} refused in {took:.2} s, {rate:.0} a second, CPU {cpu:.2} s",
                count - done
            );
            rows.push(json!({"kind": kind, "created": done, "refused": count - done, "seconds": took, "cpu_seconds": cpu}));
            self.delete(0..count)?;
        }
        Ok(json!(rows))
    }

    fn create(&self, program: &str, n: usize, asks: bool) -> Result<Child> {
        let bundle = self.directory.join(format!("bundles/{n}"));
        fs::create_dir_all(&bundle)?;
        fs::write(bundle.join("config.json"), serde_json::to_vec(&spec(&self.directory, asks))?)?;
        let log = File::create(bundle.join("log"))?;
        let mut create = self.command(program);
        create.args(["create", "--bundle"]).arg(&bundle).arg(format!("bench-{n}"));
        Ok(create.stdout(log.try_clone()?).stderr(log).spawn()?)
    }

    /// Takes containers away, many at once: each `delete` waits for its container's end.
    fn delete(&self, containers: std::ops::Range<usize>) -> Result<()> {
        for batch in containers.collect::<Vec<_>>().chunks(50) {
            let delete = |n: &usize| -> Result<Child> {
                let mut delete = self.command("runc");
                delete.args(["delete", "--force", &format!("bench-{n}")]);
                Ok(delete.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?)
            };
            for mut child in batch.iter().map(delete).collect::<Result<Vec<_>>>()? {
                child.wait()?;
            }
        }
        Ok(())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("OCI_MPS_STATE_DIR", self.layout.state())
            .env("OCI_MPS_CONFIG", self.layout.config())
            .arg("--root")
            .arg(self.directory.join("runc"))
            .stdin(Stdio::null());
        command
    }

    /// As many records as were admitted, none twice, no GPU beyond its slots, and nobody refused while there was room.
    fn assert_ledger(&self, admitted: usize, refused: usize, count: usize) -> Result<()> {
        let records = Ledger::new(&self.layout).records()?;
        let tokens: BTreeSet<&Token> = records.iter().map(|record| &record.share.token).collect();
        let places = (GPUS * SLOTS) as usize;
        let expected = count.min(places);
        if (records.len(), tokens.len(), admitted, refused)
            != (expected, expected, expected, count - expected)
        {
            return Err(format!(
                "{} records of {} tokens for {admitted} admitted and {refused} refused; expected {expected}",
                records.len(),
                tokens.len()
            )
            .into());
        }
        for gpu in &self.inventory.gpus {
            let on = records.iter().filter(|record| record.share.gpus[0].gpu == gpu.uuid).count();
            if on > SLOTS as usize {
                return Err(format!("{on} shares on {gpu}").into());
            }
        }
        Ok(())
    }
}

/// The daemon that the first container starts.
struct Daemon<'a>(&'a Host);

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let pid = fs::read_to_string(self.0.directory.join("state/pipe/nvidia-cuda-mps-control.pid"));
        if let Some(pid) = pid.ok().and_then(|pid| pid.trim().parse().ok()) {
            let _ =
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
    }
}

/// One of many: waits for the start, is admitted, says how long the lock took in milliseconds. Its share is its
/// parent's, so that it outlives it.
fn child(directory: &Path) -> Result<()> {
    let host = Host::open(directory)?;
    let document = Document::parse(&serde_json::to_vec(&spec(directory, false))?)?;
    let parent = Process::parent()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let said = match host.admit(&document, parent) {
        Ok((_, waited)) => format!("{}", milliseconds(waited)),
        Err(error) => format!("refused: {error}"),
    };
    Ok(writeln!(std::io::stdout(), "{said}")?)
}

fn spec(directory: &Path, asks: bool) -> Value {
    let annotations = if asks { json!({ASKS[0].0: ASKS[0].1, ASKS[1].0: ASKS[1].1}) } else { json!({}) };
    json!({
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["/bin/busybox", "true"],
                    "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]},
        "root": {"path": directory.join("rootfs")},
        "annotations": annotations,
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"},
                   {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                   {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev"]}],
        "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]},
    })
}

fn cpu_time(of: UsageWho) -> Result<Duration> {
    let usage = getrusage(of)?;
    let duration = |time: nix::sys::time::TimeVal| {
        Duration::new(time.tv_sec().unsigned_abs(), u32::try_from(time.tv_usec()).unwrap_or(0) * 1000)
    };
    Ok(duration(usage.user_time()) + duration(usage.system_time()))
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

fn quantile(values: &[f64], part: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an index of a few hundred"
    )]
    let at = ((values.len() as f64 - 1.0) * part) as usize;
    values.get(at).copied().unwrap_or(0.0)
}
