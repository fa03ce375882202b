//! `oci-mps explain`: what would be changed in a container's spec, without changing anything.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use similar::TextDiff;

use crate::file;
use crate::gpu::Gpu;
use crate::inject::{self, Preview};
use crate::quantity::MemoryQuantity;

pub(super) fn run(path: &Path, as_json: bool) -> Result<()> {
    let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let original = file::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let preview = inject::preview(&original, &super::setting()?)?;
    let shown = match (preview, as_json) {
        (None, true) => json!({"asks": false}).to_string() + "\n",
        (None, false) => format!("{} asks for no share: it is passed through as it is\n", path.display()),
        (Some(preview), true) => serde_json::to_string_pretty(&as_value(&preview)?)? + "\n",
        (Some(preview), false) => for_people(&path, &preview)?,
    };
    Ok(io::stdout().write_all(shown.as_bytes())?)
}

fn as_value(preview: &Preview) -> Result<Value> {
    let share = &preview.plan.share;
    let gpus: Vec<Value> = gpus(preview).map(|(gpu, memory)| gpu_as_value(preview, gpu, memory)).collect();
    Ok(json!({
        "asks": true,
        "changes": preview.before != preview.after,
        "share": {
            "gpus": gpus,
            "threads_percent": share.threads.to_string(),
            "processes": share.processes,
            "priority": share.priority,
        },
        "edits": preview.plan.edits,
        "config": serde_json::from_slice::<Value>(&preview.after.to_bytes())?,
    }))
}

fn gpu_as_value(preview: &Preview, gpu: &Gpu, memory: MemoryQuantity) -> Value {
    let share = &preview.plan.share;
    json!({
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_mib": memory,
        "memory_mib_each_process": memory.split(share.processes),
        "context_mib": gpu.context_memory(share.threads),
        "sms": gpu.sms_at(share.threads),
        "sms_total": gpu.sms,
    })
}

fn for_people(path: &Path, preview: &Preview) -> Result<String> {
    let share = &preview.plan.share;
    let mut shown = String::from("This container gets\n");
    for (gpu, memory) in gpus(preview) {
        let (each, context) = (memory.split(share.processes), gpu.context_memory(share.threads));
        let (sms, all) = (gpu.sms_at(share.threads), gpu.sms);
        writeln!(shown, "  on {gpu}, {}", gpu.uuid)?;
        write!(shown, "    memory   {memory}")?;
        if share.processes.get() > 1 {
            write!(shown, ", {each} for each of {} processes", share.processes)?;
        }
        writeln!(shown, "; a CUDA context takes about {context} of it")?;
        writeln!(shown, "    threads  {}%, which is {sms} of {all} SMs", share.threads)?;
    }
    if preview.before == preview.after {
        return Ok(shown + "\nIts config.json already says so: nothing would be changed.\n");
    }
    let (before, after) = (pretty(&preview.before.to_bytes())?, pretty(&preview.after.to_bytes())?);
    let edited = PathBuf::from(path).with_extension("json, as oci-mps would write it");
    let diff = TextDiff::from_lines(&before, &after);
    let diff = diff.unified_diff().header(&path.to_string_lossy(), &edited.to_string_lossy()).to_string();
    Ok(shown + "\n" + &diff)
}

/// The chosen GPUs with the memory on each, in the container's numbering.
fn gpus(preview: &Preview) -> impl Iterator<Item = (&Gpu, MemoryQuantity)> {
    preview.plan.share.gpus.iter().filter_map(|part| {
        let gpu = preview.inventory.gpus.iter().find(|gpu| gpu.uuid == part.gpu)?;
        Some((gpu, part.memory))
    })
}

fn pretty(document: &[u8]) -> Result<String> {
    Ok(serde_json::to_string_pretty(&serde_json::from_slice::<Value>(document)?)? + "\n")
}
