//! Commands to the control daemon, on NVIDIA's own and on the stand-in: the same cases, the same answers.

#![allow(clippy::needless_pass_by_value, reason = "an instance is its case's own, and ends with it")]

#[path = "standin/fixture.rs"]
#[allow(dead_code, reason = "each suite uses its part")]
mod fixture;

use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use fixture::{Instance, Kind, check, with_each, within};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use oci_mps::control::{ControlError, MemoryLimit, Ordinal, Pid};
use oci_mps::file::Lock;
use oci_mps::gpu::Inventory;
use oci_mps::size::Priority;

fn main() {
    let all = &Kind::ALL;
    let trials = [
        with_each(all, "what is set reads back", what_is_set_reads_back),
        with_each(all, "without a server its questions are errors", without_a_server),
        with_each(all, "a server is waited for, and one that dies is an error", a_server),
        with_each(all, "200 commands at once have 200 right answers", two_hundred_at_once),
        with_each(all, "nobody there is told from nobody answering", nobody_there),
        with_each(all, "the turn of others is waited for until the deadline", others_turn),
        with_each(all, "a container's socket carries no privilege", no_privilege),
        with_each(all, "only what -h lists is an ability", abilities),
        ["535", "550"].map(same_words).into(),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials.into_iter().flatten().collect()).exit();
}

fn two_gpus() -> Vec<Ordinal> {
    let gpu = |index: u32| {
        format!(
            "[[gpu]]\nindex = {index}\nuuid = \"GPU-1111111{index}-2222-3333-4444-555555555555\"\nname = \"H200\"\n\
             memory_mib = 143771\ncompute_capability = \"9.0\"\nsms = 132\n"
        )
    };
    let inventory: Inventory = toml::from_str(&(gpu(0) + &gpu(1))).expect("an inventory");
    Ordinal::all(&inventory).collect()
}

fn some_server() -> Pid {
    Pid::try_from(42u32).expect("a number")
}

fn limit(text: &str) -> MemoryLimit {
    MemoryLimit::new(text.parse().expect("an amount")).expect("a limit")
}

fn what_is_set_reads_back(instance: Instance) -> Result<(), Failed> {
    instance.daemon().start()?;
    let control = instance.control();
    for percentage in ["12.5", "33.333", "0.05", "0.001", "33.35", "100"] {
        control.set_default_thread_percentage(percentage.parse()?)?;
        check(control.default_thread_percentage()?.shows(percentage.parse()?), percentage)?;
    }
    let gpus = two_gpus();
    for memory in ["1M", "1023M", "1536M", "2047M", "16G", "143771M"] {
        control.set_default_memory_limit(gpus[1], Some(limit(memory)))?;
        let shown = control.default_memory_limit(gpus[1])?;
        check(
            shown.is_some_and(|shown| shown.shows(limit(memory).memory())),
            format!("{memory}: {shown:?}"),
        )?;
    }
    check(control.default_memory_limit(gpus[0])?.is_none(), "the other GPU has no limit")?;
    control.set_default_memory_limit(gpus[1], None)?;
    check(control.default_memory_limit(gpus[1])?.is_none(), "a limit is cleared")?;
    control.set_default_priority(Priority::BelowNormal)?;
    check(control.default_priority()? == Priority::BelowNormal, "priority")?;
    Ok(())
}

fn without_a_server(instance: Instance) -> Result<(), Failed> {
    instance.daemon().start()?;
    let (control, server, gpu) = (instance.control(), some_server(), two_gpus()[0]);
    check(control.server_list()?.is_empty(), "no server")?;
    check(control.clients(None)?.is_empty(), "no client")?;
    check(control.device_client_list(None)?.is_empty(), "no device")?;
    for (what, error) in [
        ("clients", control.client_list(server).unwrap_err()),
        ("terminate", control.terminate_client(server, server).unwrap_err()),
        ("shutdown", control.shutdown_server(server, false).unwrap_err()),
        ("percentage", control.thread_percentage(server).unwrap_err()),
        ("set percentage", control.set_thread_percentage(server, "50".parse()?).unwrap_err()),
        ("limit", control.memory_limit(server, gpu).unwrap_err()),
        ("set limit", control.set_memory_limit(server, gpu, limit("1G")).unwrap_err()),
    ] {
        let right = matches!(error, ControlError::NoServer { server: named } if named == server);
        check(right, format!("{what}: {error}"))?;
    }
    let status = control.server_status(server).unwrap_err();
    let unknown = matches!(status, ControlError::Unknown { .. });
    check(unknown == (instance.kind.version() < 550), status)
}

fn a_server(instance: Instance) -> Result<(), Failed> {
    instance.daemon().start()?;
    let control = instance.control().with_patience(oci_mps::control::PATIENCE);
    let started = control.start_server(0);
    if instance.kind.has_gpu() {
        return check(started?.len() == 1, "one server");
    }
    check(matches!(started, Err(ControlError::NoServerStarted { .. })), format!("{started:?}"))
}

fn two_hundred_at_once(instance: Instance) -> Result<(), Failed> {
    instance.daemon().start()?;
    let control = instance.control();
    control.set_default_thread_percentage("12.5".parse()?)?;
    control.set_default_memory_limit(two_gpus()[0], Some(limit("512M")))?;
    let ask = |number: usize| -> Result<bool, ControlError> {
        Ok(match number % 4 {
            0 => control.default_thread_percentage()?.tenths() == 125,
            1 => {
                control.default_memory_limit(two_gpus()[0])?.is_some_and(|shown| shown.memory().mib() == 512)
            }
            2 => control.default_priority()? == Priority::Normal,
            _ => control.server_list()?.is_empty(),
        })
    };
    let wrong: Vec<String> = thread::scope(|scope| {
        let asking: Vec<_> = (0..200).map(|number| scope.spawn(move || (number, ask(number)))).collect();
        let answers = asking.into_iter().map(|thread| thread.join().expect("no panic"));
        answers.filter(|(_, right)| !matches!(right, Ok(true))).map(|wrong| format!("{wrong:?}")).collect()
    });
    check(wrong.is_empty(), format!("{} wrong: {wrong:?}", wrong.len()))
}

fn nobody_there(instance: Instance) -> Result<(), Failed> {
    instance.daemon().start()?;
    instance.kill();
    let error = instance.control().answers().unwrap_err();
    check(matches!(error, ControlError::NotThere { .. }), &error)?;
    std::fs::remove_dir_all(instance.layout.pipe())?;
    let error = instance.control().answers().unwrap_err();
    check(matches!(error, ControlError::NotThere { .. }), error)
}

fn others_turn(instance: Instance) -> Result<(), Failed> {
    instance.daemon().start()?;
    // a child that another case starts at this moment holds a copy until it has become its program
    let held = Lock::acquire(&instance.layout.command_lock(), Duration::from_secs(1))?;
    let control = instance.control().with_patience(Duration::from_millis(200));
    let error = within(1.0, || control.answers().unwrap_err())?;
    check(matches!(error, ControlError::Busy { .. }), error)?;
    drop(held);
    Ok(instance.control().answers()?)
}

fn no_privilege(instance: Instance) -> Result<(), Failed> {
    instance.daemon().start()?;
    let client = instance.layout.client();
    let answer = tell(&instance, &client, "get_default_active_thread_percentage\n")?;
    check(answer == "100.0\n", format!("it is reached: {answer:?}"))?;
    let answer = tell(&instance, &client, "quit\n")?;
    check(answer == "Not enough privilege to execute quit command\n", answer)?;
    check(instance.daemon().process()?.is_some(), "it lives")?;
    let answer = tell(&instance, &client, "set_default_device_pinned_mem_limit 0 99G\n")?;
    // driver 535 looks at the user only: root in a container is root
    let trusting = instance.kind.version() < 550;
    check(answer.starts_with("Insufficient privileges for UID") != trusting, answer)
}

fn abilities(instance: Instance) -> Result<(), Failed> {
    let multi_user = instance.control().abilities()?.multi_user;
    check(multi_user == (instance.kind.version() >= 580), multi_user)
}

/// The program by hand, as a script would use it.
fn tell(instance: &Instance, pipe: &Path, lines: &str) -> Result<String, Failed> {
    let mut command = instance.by_hand(pipe);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    child.stdin.take().expect("a pipe").write_all(lines.as_bytes())?;
    Ok(String::from_utf8(child.wait_with_output()?.stdout)?)
}

/// The stand-in stands for something only as long as it says what the real one says.
fn same_words(version: &'static str) -> Trial {
    const COMMANDS: &[&str] = &[
        "get_server_list",
        "get_server_status",
        "get_server_status 42",
        "get_server_status abc",
        "get_client_list",
        "get_client_list 42",
        "get_device_client_list",
        "get_device_client_list 42",
        "ps",
        "ps -p 42",
        "get_default_active_thread_percentage",
        "set_default_active_thread_percentage 33.333",
        "set_default_active_thread_percentage 12.55",
        "set_default_active_thread_percentage 0",
        "set_default_active_thread_percentage 101",
        "set_default_active_thread_percentage abc",
        "set_default_active_thread_percentage nan",
        "set_default_active_thread_percentage",
        "get_active_thread_percentage",
        "set_active_thread_percentage 42 50",
        "set_default_device_pinned_mem_limit 0 2G",
        "get_default_device_pinned_mem_limit 0",
        "set_default_device_pinned_mem_limit 0 2047M",
        "get_default_device_pinned_mem_limit 0",
        "set_default_device_pinned_mem_limit 0 1.5G",
        "get_default_device_pinned_mem_limit 0",
        "set_default_device_pinned_mem_limit 0 2048K",
        "get_default_device_pinned_mem_limit 0",
        "set_default_device_pinned_mem_limit 0 1000",
        "get_default_device_pinned_mem_limit 0",
        "set_default_device_pinned_mem_limit 0 0G",
        "get_default_device_pinned_mem_limit 0",
        "set_default_device_pinned_mem_limit 1 512M",
        "get_default_device_pinned_mem_limit 1",
        "set_default_device_pinned_mem_limit 0 1G",
        "set_default_device_pinned_mem_limit GPU-1111 2G",
        "get_default_device_pinned_mem_limit 0",
        "set_default_device_pinned_mem_limit 0 9007199254740992M",
        "get_default_device_pinned_mem_limit 0",
        "set_default_client_priority 1",
        "get_default_client_priority",
        "set_default_client_priority 2",
        "terminate_client 1 2",
        "shutdown_server 42",
        "shutdown_server 42 -f",
        "start_server -uid 0",
        "get_device_pinned_mem_limit 42 0",
        "banana",
    ];
    Trial::ignorable_test(format!("the stand-in has the words of the real one ({version})"), move || {
        let number = version.parse()?;
        let (real, ours) = (Kind::Real(number), Kind::StandIn(number));
        let (real_program, our_program) = match (real.program(), ours.program()) {
            (Err(reason), _) | (_, Err(reason)) => return Ok(Completion::ignored_with(reason)),
            (Ok(real), Ok(ours)) => (real, ours),
        };
        let transcript = |kind: Kind, program: &Path| -> Result<Vec<(&str, String)>, Failed> {
            let instance = Instance::new(kind, program);
            instance.start_by_hand();
            let pipe = instance.layout.pipe();
            let told =
                |command: &&'static str| Ok((*command, tell(&instance, &pipe, &format!("{command}\n"))?));
            COMMANDS.iter().map(told).collect()
        };
        let (real, ours) = (transcript(real, &real_program)?, transcript(ours, &our_program)?);
        let differ: Vec<_> = real.iter().zip(&ours).filter(|(real, ours)| real != ours).collect();
        check(differ.is_empty(), format!("{differ:#?}")).map(|()| Completion::Completed)
    })
}
