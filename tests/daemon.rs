//! The daemon's life, with NVIDIA's own control program and with the stand-in.

#![allow(clippy::needless_pass_by_value, reason = "an instance is its case's own, and ends with it")]

#[path = "standin/fixture.rs"]
#[allow(dead_code, reason = "each suite uses its part")]
mod fixture;

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use fixture::{Instance, Kind, check, copy, with_each, within};
use libtest_mimic::{Arguments, Failed};
use oci_mps::config::Start;
use oci_mps::daemon::{Daemon, DaemonError, READY_WITHIN, Ready};
use oci_mps::file::Lock;
use oci_mps::layout::LONGEST_PIPE_DIRECTORY;
use oci_mps::layout::{Layout, Owner, env};

const STAND_IN: &[Kind] = &[Kind::StandIn(535)];

/// What a deadline of 5 s may be late by on a machine that is busy with other tests.
const FIVE_SECONDS: f32 = 5.9;

fn main() {
    let all = &Kind::ALL;
    let trials = [
        with_each(all, "20 starts at once make one daemon", twenty_at_once),
        with_each(all, "files of a killed daemon keep nobody from starting", after_a_kill),
        with_each(all, "a container sees the socket and nothing else", client_directory),
        with_each(all, "a daemon that somebody else started is adopted", adopted),
        with_each(all, "a silent connection is an error that says so", silent_connection),
        with_each(all, "it owes nothing to whoever started it", detached),
        with_each(all, "after a stop nothing is left", stopped),
        with_each(all, "a last check notices a dead daemon and a new one", checked),
        with_each(all, "as a service it is not started on demand", service),
        with_each(all, "a path too long for a socket is named", too_long),
        with_each(
            &[Kind::Real(580), Kind::StandIn(580)],
            "multi-user is asked for where it is known",
            multi_user,
        ),
        with_each(STAND_IN, "one that answers nobody is an error within 5 s", hangs),
        with_each(STAND_IN, "what it logged before it died is shown", dies),
        with_each(STAND_IN, "a slow start is waited for", slow),
        with_each(STAND_IN, "a start that does not end is given up within 5 s", too_slow),
        with_each(STAND_IN, "somebody's endless start is given up within 5 s", start_locked),
        with_each(STAND_IN, "a directory that others can write is not used", not_trusted),
        with_each(STAND_IN, "a program that is not there is named with its package", not_installed),
        with_each(STAND_IN, "under systemd it is started as a unit", under_systemd),
        with_each(STAND_IN, "a systemd-run that fails is quoted", systemd_fails),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials.into_iter().flatten().collect()).exit();
}

fn twenty_at_once(instance: Instance) -> Result<(), Failed> {
    let daemon = instance.daemon();
    let results: Vec<_> = thread::scope(|scope| {
        let starts: Vec<_> = (0..20).map(|_| scope.spawn(|| daemon.ready())).collect();
        starts.into_iter().map(|start| start.join().expect("no panic")).collect()
    });
    let started = results.iter().filter(|result| matches!(result, Ok(Ready::Started))).count();
    check(results.iter().all(Result::is_ok) && started == 1, format!("{results:?}"))?;
    check(instance.daemons().len() == 1, format!("{:?}", instance.daemons()))
}

fn after_a_kill(instance: Instance) -> Result<(), Failed> {
    let daemon = instance.daemon();
    daemon.ready()?;
    let old = fs::metadata(instance.layout.client().join("control"))?.ino();
    instance.kill();
    check(instance.layout.pipe().join("control").exists(), "its files are still there")?;
    check(daemon.ready()? == Ready::Started, "it is started anew")?;
    check(fs::metadata(instance.layout.client().join("control"))?.ino() != old, "with a new socket")?;
    check(daemon.ready()? == Ready::Already, "and runs")
}

fn client_directory(instance: Instance) -> Result<(), Failed> {
    let (client, pipe) = (instance.layout.client(), instance.layout.pipe());
    fs::create_dir_all(client.join("left/over"))?;
    instance.daemon().ready()?;
    let names: Vec<_> =
        fs::read_dir(&client)?.map(|entry| entry.map(|entry| entry.file_name())).collect::<Result<_, _>>()?;
    check(names == ["control"], format!("{names:?}"))?;
    let inode = |path: &Path| fs::metadata(path).map(|file| file.ino());
    check(inode(&client.join("control"))? == inode(&pipe.join("control"))?, "a link to the daemon's")?;
    for (path, expected) in [
        (&client, 0o755),
        (&pipe, 0o711),
        (&client.join("control"), 0o666),
        (&pipe.join("control_lock"), 0o600),
    ] {
        let mode = fs::metadata(path)?.permissions().mode() & 0o7777;
        check(mode == expected, format!("{}: {mode:o}", path.display()))?;
    }
    Ok(())
}

fn adopted(instance: Instance) -> Result<(), Failed> {
    fs::create_dir_all(instance.layout.pipe())?;
    instance.start_by_hand();
    let before = instance.daemons();
    check(instance.daemon().ready()? == Ready::Adopted, "adopted")?;
    check(instance.daemons() == before, "and not started a second time")?;
    check(instance.daemon().ready()? == Ready::Already, "once")?;
    instance.daemon().check().map_err(Failed::from)
}

/// The real ones are wedged by one process that connects and says nothing.
fn silent_connection(instance: Instance) -> Result<(), Failed> {
    let daemon = instance.daemon();
    daemon.ready()?;
    let silent = connect(&instance.layout.client().join("control"))?;
    let error = within(FIVE_SECONDS, || daemon.ready())?.expect_err("no answer").to_string();
    check(error.contains("does not answer") && error.contains("wedged") && error.contains("ss -xp"), &error)?;
    drop(silent);
    check(daemon.ready()? == Ready::Already, "it is well again")
}

fn detached(instance: Instance) -> Result<(), Failed> {
    instance.daemon().ready()?;
    let pid = instance.daemon().process()?.ok_or("it lives")?;
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let read = |name: &str| fs::read_to_string(proc.join(name));
    check(fs::read_link(proc.join("cwd"))? == Path::new("/"), "its directory")?;
    for standard in ["fd/0", "fd/1", "fd/2"] {
        let open = fs::read_link(proc.join(standard))?;
        check(open == Path::new("/dev/null"), format!("{standard}: {}", open.display()))?;
    }
    for entry in fs::read_dir(proc.join("fd"))? {
        let open = fs::read_link(entry?.path())?;
        let own = ["/dev/null", "/dev/nvidia", "socket:", "pipe:", "anon_inode:"]
            .iter()
            .any(|own| open.to_string_lossy().starts_with(own));
        check(own || open.starts_with(instance.layout.state()), format!("it holds {}", open.display()))?;
    }
    let session = |stat: &str| {
        stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(3).map(str::to_owned))
    };
    check(session(&read("stat")?) != session(&fs::read_to_string("/proc/self/stat")?), "its session")?;
    let mut environment: Vec<String> = read("environ")?.split_terminator('\0').map(str::to_owned).collect();
    environment.sort();
    let names: Vec<_> = environment.iter().filter_map(|one| one.split('=').next()).collect();
    check(
        names == ["CUDA_DEVICE_ORDER", env::LOG_DIRECTORY, env::PIPE_DIRECTORY, "PATH"],
        format!("{names:?}"),
    )?;
    let limits = read("limits")?;
    let open_files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap_or_default();
    let soft: u64 = open_files.split_whitespace().nth(3).unwrap_or_default().parse()?;
    let hard: u64 = open_files.split_whitespace().nth(4).unwrap_or_default().parse()?;
    check(soft >= hard.min(16_384), open_files)?;
    check(read("cgroup")?.lines().all(|line| line.ends_with(":/")), read("cgroup")?)
}

fn stopped(instance: Instance) -> Result<(), Failed> {
    let daemon = instance.daemon();
    check(!daemon.stop(None, Duration::from_secs(5))?, "nothing to stop")?;
    daemon.ready()?;
    check(daemon.stop(Some(Duration::from_secs(1)), Duration::from_secs(5))?, "stopped")?;
    check(instance.daemons().is_empty(), "no process")?;
    check(!instance.layout.pipe().exists(), "no pipe directory")?;
    check(fs::read_dir(instance.layout.client())?.count() == 0, "no way for containers")?;
    check(daemon.ready()? == Ready::Started, "and starts again")
}

fn checked(instance: Instance) -> Result<(), Failed> {
    let daemon = instance.daemon();
    daemon.ready()?;
    daemon.check()?;
    instance.kill();
    let error = daemon.check().unwrap_err();
    check(matches!(error, DaemonError::Ended { .. }), &error)?;
    instance.start_by_hand();
    let error = daemon.check().unwrap_err();
    check(matches!(error, DaemonError::ClientOutdated { .. }), &error)
}

fn service(mut instance: Instance) -> Result<(), Failed> {
    instance.config.start = Start::Service;
    let error = instance.daemon().ready().unwrap_err();
    check(error.to_string().contains("oci-mps up") && instance.daemons().is_empty(), error)?;
    check(instance.daemon().start()? == Ready::Started, "the service starts it")?;
    check(instance.daemon().ready()? == Ready::Already, "and then it is ready")
}

fn too_long(instance: Instance) -> Result<(), Failed> {
    let used = instance.directory.path().as_os_str().len() + "/".len() + "/pipe".len();
    let state = instance.directory.path().join("x".repeat(LONGEST_PIPE_DIRECTORY - used + 1));
    let layout = Layout::new(Owner::Root, |name| (name == env::STATE_DIR).then(|| state.clone().into()));
    let error = Daemon::on(instance.host.clone(), &layout, &instance.config).ready().unwrap_err();
    check(error.to_string().contains("too long") && error.to_string().contains("OCI_MPS_STATE_DIR"), error)?;
    // the longest that is taken works
    let state = instance.directory.path().join("x".repeat(LONGEST_PIPE_DIRECTORY - used));
    let layout = Layout::new(Owner::Root, |name| (name == env::STATE_DIR).then(|| state.clone().into()));
    let daemon = Daemon::on(instance.host.clone(), &layout, &instance.config);
    let ready = daemon.ready();
    daemon.stop(Some(Duration::from_secs(1)), Duration::from_secs(5))?;
    check(matches!(ready, Ok(Ready::Started)), format!("{ready:?}"))
}

fn multi_user(mut instance: Instance) -> Result<(), Failed> {
    let asked = |instance: &Instance| -> Result<bool, Failed> {
        instance.daemon().ready()?;
        let pid = instance.daemon().process()?.ok_or("it lives")?;
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline"))?;
        instance.kill();
        Ok(command.contains("--multiuser-server"))
    };
    check(asked(&instance)?, "asked for")?;
    instance.config.multi_user = false;
    check(!asked(&instance)?, "not asked for")
}

fn hangs(instance: Instance) -> Result<(), Failed> {
    instance.settings("mode=hang");
    for _when in ["it is started", "it runs"] {
        let error = within(FIVE_SECONDS, || instance.daemon().ready())?.expect_err("no answer").to_string();
        check(error.contains("does not answer") && error.contains("wedged"), error)?;
    }
    Ok(())
}

fn dies(instance: Instance) -> Result<(), Failed> {
    instance.settings("mode=die");
    fs::create_dir_all(instance.layout.logs())?;
    fs::write(instance.layout.logs().join("control.log"), "of an earlier start\n")?;
    let error = within(2.0, || instance.daemon().ready())?.expect_err("it died").to_string();
    for words in ["cannot start", "exit status: 1", "set to die", "control.log ends with:", "Dying at once"] {
        check(error.contains(words), format!("{words:?} is not in {error}"))?;
    }
    check(!error.contains("earlier"), error)
}

fn slow(instance: Instance) -> Result<(), Failed> {
    instance.settings("delay_ms=700");
    check(instance.daemon().ready()? == Ready::Started, "started")
}

fn too_slow(instance: Instance) -> Result<(), Failed> {
    instance.settings("delay_ms=20000");
    let error = within(FIVE_SECONDS, || instance.daemon().ready())?.expect_err("too slow").to_string();
    check(error.contains("did not finish within 4") && error.contains("wrote nothing"), error)
}

fn start_locked(instance: Instance) -> Result<(), Failed> {
    fs::create_dir_all(instance.layout.state())?;
    let _held = Lock::acquire(&instance.layout.start_lock(), Duration::from_secs(1))?;
    let error = within(FIVE_SECONDS, || instance.daemon().ready())?.expect_err("held");
    check(matches!(error, DaemonError::StartLocked { .. }), error)
}

fn not_trusted(instance: Instance) -> Result<(), Failed> {
    fs::create_dir_all(instance.layout.pipe())?;
    fs::set_permissions(instance.layout.pipe(), fs::Permissions::from_mode(0o777))?;
    let error = instance.daemon().ready().unwrap_err();
    check(error.to_string().contains("mode 0777"), error)?;
    check(instance.daemon().check().is_err() && instance.daemons().is_empty(), "nothing was started")
}

fn not_installed(mut instance: Instance) -> Result<(), Failed> {
    instance.config.control = PathBuf::from("nvidia-cuda-mps-control");
    instance.host.program_directories = vec![PathBuf::from("/nonexistent/bin")];
    let error = instance.daemon().ready().unwrap_err().to_string();
    let says = ["nvidia-cuda-mps on Debian", "[daemon] control", "looked in /nonexistent/bin"];
    check(says.iter().all(|words| error.contains(words)), error)
}

/// What a host with systemd is to the daemon's room: a directory, and a program that gets a command line.
fn with_systemd(instance: &mut Instance, script: &str) -> Result<PathBuf, Failed> {
    let bin = instance.directory.path().join("bin");
    fs::create_dir(&bin)?;
    let text = instance.directory.path().join("script");
    fs::write(&text, format!("#!/bin/sh\n{script}\n"))?;
    fs::set_permissions(&text, fs::Permissions::from_mode(0o755))?;
    copy(&text, &bin.join("systemd-run"));
    instance.host.program_directories = vec![bin.clone()];
    instance.host.systemd_runs.clone_from(&bin);
    instance.host.owner = Owner::Root;
    Ok(bin.join("argv"))
}

fn under_systemd(mut instance: Instance) -> Result<(), Failed> {
    let run = r#"printf '%s\n' "$@" >"${0%/*}/argv"
for word; do
  case $word in
    --setenv=*) export "${word#--setenv=}" ;;
  esac
done
while [ "$1" != -- ]; do shift; done
shift
exec "$@""#;
    let recorded = with_systemd(&mut instance, run)?;
    check(instance.daemon().ready()? == Ready::Started, "started")?;
    let recorded = fs::read_to_string(recorded)?;
    let unit = recorded.lines().find(|word| word.starts_with("--unit=")).unwrap_or_default();
    check(unit.starts_with("--unit=oci-mps-daemon-"), unit)?;
    for word in ["--collect", "--service-type=forking", "--property=LimitNOFILE=16384"] {
        check(recorded.lines().any(|one| one == word), format!("{word} is not in {recorded}"))?;
    }
    check(recorded.ends_with(&format!("--\n{}\n-d\n", instance.program.display())), recorded)
}

fn systemd_fails(mut instance: Instance) -> Result<(), Failed> {
    with_systemd(&mut instance, "echo 'Failed to connect to bus' >&2; exit 1")?;
    let error = instance.daemon().ready().unwrap_err().to_string();
    check(error.contains("systemd-run ended with exit status: 1 and said: Failed to connect to bus"), error)
}

/// A connection that nobody speaks on.
fn connect(path: &Path) -> Result<OwnedFd, Failed> {
    use nix::libc::{AF_UNIX, SOCK_SEQPACKET, connect, sockaddr_un, socket};
    // SAFETY: all fields of the structure are numbers, for which 0 is a value.
    let mut address: sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = u16::try_from(AF_UNIX)?;
    for (to, from) in address.sun_path.iter_mut().zip(path.as_os_str().as_encoded_bytes()) {
        *to = from.cast_signed();
    }
    // SAFETY: takes no pointers; the descriptor belongs to nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(socket(AF_UNIX, SOCK_SEQPACKET, 0)) };
    let length = u32::try_from(size_of_val(&address))?;
    // SAFETY: the address is a whole `sockaddr_un` and outlives the call.
    let result = unsafe { connect(socket.as_raw_fd(), (&raw const address).cast(), length) };
    let begun = Instant::now();
    // it is listened to once it is accepted, which is the daemon's next turn
    while begun.elapsed() < Duration::from_millis(50) {
        thread::sleep(Duration::from_millis(5));
    }
    check(result == 0, std::io::Error::last_os_error()).map(|()| socket)
}

const _: () = assert!(READY_WITHIN.as_secs() == 5);
