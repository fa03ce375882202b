//! The one path from a spec to a share, through podman's hook and the hooks of a container's life, with the stand-in
//! for the control daemon and with NVIDIA's: what is promised is written down once, and no more than that is had.

#![allow(clippy::needless_pass_by_value, reason = "an instance is its case's own, and ends with it")]

#[path = "standin/fixture.rs"]
#[allow(dead_code, reason = "each suite uses its part")]
mod fixture;

use std::fs;
use std::io::Write;
use std::process::{Command, Output, Stdio};

use fixture::{Instance, Kind, check, with_each};
use libtest_mimic::{Arguments, Failed};
use oci_mps::layout::{TOKEN_ANNOTATION, env};
use serde_json::{Value, json};

fn main() {
    let kinds = &[Kind::StandIn(580), Kind::Real(550)];
    let trials = [
        with_each(kinds, "a second run changes nothing, byte for byte", twice),
        with_each(kinds, "a copied token is no way to a share of another size", forged),
        with_each(kinds, "of two containers with one token the second does not start", one_token),
        with_each(kinds, "what cannot be edited leaves no record", not_editable),
        with_each(kinds, "a container that ended is reaped when room is needed", reaped),
        with_each(kinds, "a container without its daemon is not created", daemon_ended),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials.into_iter().flatten().collect()).exit();
}

/// `oci-mps hook STAGE` with that on its standard input.
fn hook(instance: &Instance, stage: &str, input: &Value) -> Result<Output, Failed> {
    let inventory = instance.directory.path().join("gpus.toml");
    fs::copy("docs/examples/gpus.toml", &inventory)?;
    let config = instance.directory.path().join("config.toml");
    let (control, inventory) = (instance.program.display(), inventory.display());
    fs::write(
        &config,
        format!(
            "[daemon]\ncontrol = \"{control}\"\n[inventory]\nsource = \"file\"\nfile = \"{inventory}\"\n"
        ),
    )?;
    let mut child = Command::new(env!("CARGO_BIN_EXE_oci-mps"))
        .args(["hook", stage])
        .env(env::STATE_DIR, instance.layout.state())
        .env(env::CONFIG, config)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    child.stdin.take().expect("a pipe").write_all(&serde_json::to_vec(input)?)?;
    Ok(child.wait_with_output()?)
}

fn spec(memory: &str) -> Value {
    json!({"ociVersion": "1.0.2", "process": {"env": ["A=1"]}, "annotations": {"oci-mps/memory": memory},
           "linux": {"namespaces": [{"type": "ipc"}]}})
}

/// The spec as the hook gives it back.
fn edited(instance: &Instance, spec: &Value) -> Result<Value, Failed> {
    let output = hook(instance, "precreate", spec)?;
    check(output.status.success(), String::from_utf8_lossy(&output.stderr))?;
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn token(spec: &Value) -> String {
    spec["annotations"][TOKEN_ANNOTATION].as_str().expect("a token").to_owned()
}

/// The state that a runtime gives its hooks.
fn state(id: &str, pid: u32, spec: &Value) -> Value {
    json!({"ociVersion": "1.0.2", "id": id, "status": "creating", "pid": pid, "bundle": "/b",
           "annotations": spec["annotations"]})
}

/// Token and memory of every record.
fn records(instance: &Instance) -> Result<Vec<(String, u64)>, Failed> {
    let ledger: Value = serde_json::from_slice(&fs::read(instance.layout.shares())?)?;
    let record = |record: &Value| {
        let share = &record["share"];
        let memory = share["gpus"][0]["memory_mib"].as_u64().expect("an amount");
        (share["token"].as_str().expect("a token").to_owned(), memory)
    };
    Ok(ledger["shares"].as_array().expect("a list").iter().map(record).collect())
}

fn twice(instance: Instance) -> Result<(), Failed> {
    let once = hook(&instance, "precreate", &spec("8GiB"))?.stdout;
    let again = hook(&instance, "precreate", &serde_json::from_slice(&once)?)?.stdout;
    check(once == again, String::from_utf8_lossy(&again))?;
    check(records(&instance)?.len() == 1, "one container, one share")
}

fn forged(instance: Instance) -> Result<(), Failed> {
    let large = edited(&instance, &spec("100GiB"))?;
    let mut small = spec("2GiB");
    small["annotations"][TOKEN_ANNOTATION] = json!(token(&large));
    let small = edited(&instance, &small)?;
    check(token(&small) != token(&large), "it is given a token of its own")?;
    let mut held: Vec<u64> = records(&instance)?.into_iter().map(|(_, memory)| memory).collect();
    held.sort_unstable();
    check(held == [2048, 102_400], format!("{held:?}"))
}

fn one_token(instance: Instance) -> Result<(), Failed> {
    let first = edited(&instance, &spec("8GiB"))?;
    let own = std::process::id();
    let output = hook(&instance, "createRuntime", &state("first", own, &first))?;
    check(output.status.success(), String::from_utf8_lossy(&output.stderr))?;
    let output = hook(&instance, "createRuntime", &state("second", own, &first))?;
    let said = String::from_utf8_lossy(&output.stderr);
    check(!output.status.success() && said.contains("already belongs to the container first"), &said)?;
    hook(&instance, "poststop", &state("second", own, &first))?;
    check(records(&instance)?.len() == 1, "and its end takes nothing from the first")?;
    hook(&instance, "poststop", &state("first", own, &first))?;
    check(records(&instance)?.is_empty(), "which gives back its own")
}

fn not_editable(instance: Instance) -> Result<(), Failed> {
    let mut broken = spec("8GiB");
    broken["hooks"] = json!([]);
    let output = hook(&instance, "precreate", &broken)?;
    let said = String::from_utf8_lossy(&output.stderr);
    check(!output.status.success() && said.contains("hooks in the container's config.json is not"), &said)?;
    check(output.stdout.is_empty(), "no spec")?;
    check(!instance.layout.shares().exists() || records(&instance)?.is_empty(), "no record")
}

fn reaped(instance: Instance) -> Result<(), Failed> {
    let mut child = Command::new("sleep").arg("60").spawn()?;
    let first = edited(&instance, &spec("100GiB"))?;
    let output = hook(&instance, "createRuntime", &state("first", child.id(), &first))?;
    check(output.status.success(), String::from_utf8_lossy(&output.stderr))?;
    let output = hook(&instance, "precreate", &spec("100GiB"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    check(!output.status.success() && said.contains("left to share"), &said)?;
    child.kill()?;
    child.wait()?;
    edited(&instance, &spec("100GiB"))?;
    check(records(&instance)?.len() == 1, "the dead one's is gone")
}

fn daemon_ended(instance: Instance) -> Result<(), Failed> {
    let spec = edited(&instance, &spec("8GiB"))?;
    instance.kill();
    let output = hook(&instance, "createRuntime", &state("c", std::process::id(), &spec))?;
    let said = String::from_utf8_lossy(&output.stderr);
    check(!output.status.success() && said.contains("the MPS control daemon has ended"), &said)
}
