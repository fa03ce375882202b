//! `oci-mps shares`: first what an operator asks for, allocated/total a GPU, then who has it and what they use of it.
//! docs/shares.md describes the JSON.

mod used;

use std::io::{self, IsTerminal, Write};
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Result, bail};
use serde_json::{Value, json};

use self::used::Used;
use super::table;
use crate::config::HostConfig;
use crate::gpu::{Gpu, Inventory};
use crate::inventory;
use crate::ledger::{Container, Ledger, Owner, Record};
use crate::origin::Origin;
use crate::share::{GpuShare, Promised};

/// Once, or again and again.
pub(super) fn run(as_json: bool, every: Option<Duration>) -> Result<()> {
    loop {
        let text = shown(as_json)?;
        let mut out = io::stdout().lock();
        if every.is_some() && out.is_terminal() {
            // to the first line, and nothing below it
            out.write_all(b"\x1b[H\x1b[2J")?;
        }
        out.write_all(text.as_bytes())?;
        out.flush()?;
        match every {
            None => return Ok(()),
            Some(pause) => thread::sleep(pause),
        }
    }
}

/// Takes a share from a container that is gone and left it.
pub(super) fn release(name: &str) -> Result<()> {
    let mut book = Ledger::new(&super::layout()).open()?;
    let meant = book.meant_by(name)?;
    let record = match meant.as_slice() {
        [] => bail!("no share belongs to {name:?}; see 'oci-mps shares'"),
        [record] => record,
        several => {
            let tokens: Vec<&str> = several.iter().map(|record| record.share.token.as_str()).collect();
            bail!("{name:?} may mean {} shares; name one of {}", several.len(), tokens.join(", "));
        }
    };
    if let Owner::Attached(container) = &record.owner
        && record.is_live()
    {
        bail!(
            "the container {} still runs (process {}) and would go on using what is given to others; stop it first",
            container.short_name(),
            container.process.pid
        );
    }
    book.forget(&record.share.token)?;
    Ok(writeln!(io::stdout(), "released the share of {}", record.holder_name())?)
}

/// What stands in the ledger now, and what is used of it.
fn shown(as_json: bool) -> Result<String> {
    let setting = super::setting()?;
    let config = HostConfig::load(setting.layout.config())?;
    let programs = setting.programs.map_err(anyhow::Error::msg)?;
    let inventory = inventory::current(&setting.layout, &config, &programs.oci_mps)?;
    let ledger = Ledger::new(&setting.layout);
    let records: Vec<Record> = ledger.records()?.into_iter().filter(Record::is_live).map(known).collect();
    let used = Used::now(&config);
    if as_json {
        return Ok(serde_json::to_string_pretty(&as_value(&config, &inventory, &records, &used))? + "\n");
    }
    let totals = table::text(
        ["GPU", "NAME", "ALLOCATED/TOTAL", "", "CLIENTS", "SLICES", "SHARED"],
        inventory.gpus.iter().map(|gpu| totals(gpu, &config, &inventory, &records)),
    );
    let heads = [
        "CONTAINER",
        "NAME",
        "ENGINE",
        "IMAGE",
        "GPU",
        "MEMORY",
        "USED",
        "THREADS",
        "SMS",
        "PROCESSES",
        "STATE",
        "SINCE",
    ];
    let shares = table::text(heads, records.iter().flat_map(|record| rows(record, &inventory, &used)));
    Ok(format!("{totals}\n{shares}"))
}

/// A record with what its engine's store knows of the container's name.
fn known(mut record: Record) -> Record {
    if let Owner::Attached(container) = &mut record.owner {
        used::complete(container);
    }
    record
}

fn promised(gpu: &Gpu, records: &[Record]) -> Promised {
    Promised::of(records.iter().map(|record| &record.share), &gpu.uuid)
}

fn totals(gpu: &Gpu, config: &HostConfig, inventory: &Inventory, records: &[Record]) -> [String; 7] {
    let promised = promised(gpu, records);
    let (allocated, total) = (promised.memory.mib(), gpu.memory.mib());
    let shared = match (gpu.mig, config.gpus.manages(gpu)) {
        (true, _) => "no: MIG",
        (false, false) => "no: set apart",
        (false, true) => "yes",
    };
    [
        gpu.index.to_string(),
        gpu.name.clone(),
        format!("{}/{}", promised.memory.to_string().trim_end_matches(" MiB"), gpu.memory),
        format!("({}%)", allocated * 100 / total.max(1)),
        format!("{}/{}", promised.clients, gpu.client_slots(inventory.cuda)),
        config.policy.on(gpu).slices.to_string(),
        shared.to_owned(),
    ]
}

/// A row for each of the container's GPUs.
fn rows(record: &Record, inventory: &Inventory, used: &Used) -> Vec<[String; 12]> {
    let nobody = Origin::default();
    let (container, origin, state) = match &record.owner {
        Owner::Reserved { holder, .. } => (format!("(process {})", holder.pid), &nobody, "reserved"),
        Owner::Attached(container) => (container.short_id().to_owned(), &container.origin, "attached"),
    };
    let share = &record.share;
    let or_unknown = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".to_owned());
    let row = |part: &GpuShare| {
        let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == part.gpu);
        [
            container.clone(),
            or_unknown(&origin.name),
            or_unknown(&origin.engine),
            or_unknown(&origin.image),
            gpu.map_or_else(|| part.gpu.to_string(), |gpu| gpu.index.to_string()),
            part.memory.to_string(),
            used.by(record, &part.gpu).map_or_else(|| "unknown".to_owned(), |memory| memory.to_string()),
            format!("{}%", share.threads),
            gpu.map_or_else(String::new, |gpu| gpu.sms_at(share.threads).to_string()),
            share.processes.to_string(),
            state.to_owned(),
            ago(record.since),
        ]
    };
    share.gpus.iter().map(row).collect()
}

fn ago(since: u64) -> String {
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(since);
    let seconds = SystemTime::now().duration_since(then).map_or(0, |ago| ago.as_secs());
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

fn as_value(config: &HostConfig, inventory: &Inventory, records: &[Record], used: &Used) -> Value {
    let gpus = inventory.gpus.iter().map(|gpu| {
        let promised = promised(gpu, records);
        let terms = config.policy.on(gpu);
        json!({
            "index": gpu.index,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "managed": config.gpus.manages(gpu),
            "mig": gpu.mig,
            "memory_mib": gpu.memory,
            "shareable_mib": terms.shareable(gpu.memory),
            "allocated_mib": promised.memory,
            "slices": terms.slices,
            "threads_percent": thousandths(promised.threads),
            "clients": promised.clients,
            "client_slots": gpu.client_slots(inventory.cuda),
        })
    });
    let shares = records.iter().map(|record| share_as_value(record, inventory, used));
    json!({"gpus": gpus.collect::<Vec<_>>(), "shares": shares.collect::<Vec<_>>()})
}

fn share_as_value(record: &Record, inventory: &Inventory, used: &Used) -> Value {
    let share = &record.share;
    let part = |part: &GpuShare| {
        let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == part.gpu);
        json!({
            "gpu": part.gpu,
            "index": gpu.map(|gpu| gpu.index),
            "memory_mib": part.memory,
            "used_mib": used.by(record, &part.gpu),
            "sms": gpu.map(|gpu| gpu.sms_at(share.threads)),
        })
    };
    let mut value = json!({
        "token": share.token,
        "state": "reserved",
        "since": record.since,
        "gpus": share.gpus.iter().map(part).collect::<Vec<_>>(),
        "threads_percent": thousandths(share.threads.thousandths().into()),
        "processes": share.processes,
        "priority": share.priority,
    });
    match &record.owner {
        Owner::Reserved { holder, .. } => value["holder"] = json!(holder),
        Owner::Attached(Container { id, bundle, process, cgroup, origin }) => {
            value["state"] = json!("attached");
            for (key, word) in [
                ("id", json!(id)),
                ("name", json!(origin.name)),
                ("engine", json!(origin.engine)),
                ("image", json!(origin.image)),
                ("bundle", json!(bundle)),
                ("process", json!(process)),
                ("cgroup", json!(cgroup)),
            ] {
                value[key] = word;
            }
        }
    }
    value
}

/// Thousandths of a percent as percent.
#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn thousandths(value: u64) -> f64 {
    value as f64 / 1000.0
}
