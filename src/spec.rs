//! The `config.json` document: read in parts, edited in place, written back with everything else as it was.
//!
//! A typed round trip would lose what its types do not know: `oci-spec` drops unknown keys and `null`s and shuffles
//! capabilities. So the JSON document itself is edited, with the order of its keys, its numbers' digits and its
//! indentation. This room knows OCI and nothing of MPS.

use std::fmt;
use std::path::Path;

use oci_spec::runtime::{Hook, Mount};
use serde::Serialize;
use serde_json::ser::{CompactFormatter, PrettyFormatter};
use serde_json::{Map, Value, json};

/// A container's configuration, as the engine wrote it.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    root: Map<String, Value>,
    style: Style,
}

/// One change. Applying it a second time changes nothing.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "edit", rename_all = "kebab-case")]
pub enum Edit {
    /// The variable has this value, once.
    SetEnv {
        /// Its name.
        name: String,
        /// Its value.
        value: String,
    },
    /// The variable is not set.
    RemoveEnv {
        /// Its name.
        name: String,
    },
    /// The container stays in the runtime's own namespace of that kind.
    LeaveNamespace {
        /// `ipc`, `network`, …
        kind: &'static str,
    },
    /// This, and nothing else, is mounted at its destination, and no other mount hides it.
    Mount(Box<Mount>),
    /// Nothing is mounted there.
    RemoveMount {
        /// Where in the container.
        destination: &'static str,
    },
    /// The hook runs in that stage.
    AddHook {
        /// When.
        stage: Stage,
        /// What. Path and arguments identify it; another environment or timeout replaces it.
        hook: Box<Hook>,
    },
    /// The annotation has this value.
    Annotate {
        /// Its key.
        key: String,
        /// Its value.
        value: String,
    },
}

/// The stages of a container's life in which hooks run (OCI runtime specification, "POSIX-platform Hooks").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Stage {
    /// Namespaces are there, `pivot_root` is still to come; runs outside of them.
    CreateRuntime,
    /// The container is gone.
    Poststop,
}

/// A namespace of the container's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace<'a> {
    /// An existing one that is joined; a new one where there is no path.
    pub path: Option<&'a str>,
}

/// A mount as far as it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountView<'a> {
    /// Where in the container.
    pub destination: &'a str,
    /// `bind`, `tmpfs`, … ; many binds leave it out.
    pub kind: Option<&'a str>,
    /// In the order they are written.
    pub options: Vec<&'a str>,
}

/// Why a document is not one.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// Broken JSON.
    #[error("the container's config.json is not JSON: {0}; create the container anew")]
    Json(#[from] serde_json::Error),
    /// JSON, but not an object.
    #[error("the container's config.json is not a JSON object")]
    NotAnObject,
    /// A field that is not what the specification says.
    #[error("{field} in the container's config.json is not {expected}")]
    Shape {
        /// Its path from the root.
        field: String,
        /// What it ought to be.
        expected: &'static str,
    },
    /// A number in disguise: the JSON library's own marker would be changed on the way back.
    #[error(
        "the container's config.json holds the reserved key {NUMBER_MARKER:?}, which cannot be kept as it is"
    )]
    Reserved,
}

/// With `arbitrary_precision`, `serde_json` reads an object with this one key as a number.
const NUMBER_MARKER: &str = "$serde_json::private::Number";

/// How the document is laid out.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Style {
    /// What one level is indented by; nothing where all stands on one line.
    indent: Option<Vec<u8>>,
    final_newline: bool,
}

impl Document {
    /// Reads a document.
    ///
    /// # Errors
    /// Where it is not a JSON object, or cannot be written back as it was.
    pub fn parse(bytes: &[u8]) -> Result<Self, SpecError> {
        if memchr::memmem::find(bytes, NUMBER_MARKER.as_bytes()).is_some() {
            return Err(SpecError::Reserved);
        }
        match serde_json::from_slice(bytes)? {
            Value::Object(root) => Ok(Self { root, style: Style::of(bytes) }),
            _ => Err(SpecError::NotAnObject),
        }
    }

    /// The document in its own style.
    ///
    /// # Panics
    /// Never: a JSON value can always be written to memory.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let written = match &self.style.indent {
            None => write_with(&mut bytes, &self.root, CompactFormatter),
            Some(indent) => write_with(&mut bytes, &self.root, PrettyFormatter::with_indent(indent)),
        };
        written.expect("a JSON value can be written to memory");
        if self.style.final_newline {
            bytes.push(b'\n');
        }
        bytes
    }

    /// The annotations, in their order.
    ///
    /// # Errors
    /// Where one of them is not a string.
    pub fn annotations(&self) -> Result<Vec<(&str, &str)>, SpecError> {
        let Some(annotations) = object_in(&self.root, "annotations")? else { return Ok(Vec::new()) };
        annotations
            .iter()
            .map(|(key, value)| match value.as_str() {
                Some(value) => Ok((key.as_str(), value)),
                None => Err(shape(format!("annotations[{key:?}]"), "a string")),
            })
            .collect()
    }

    /// The value of one annotation.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.root.get("annotations")?.get(key)?.as_str()
    }

    /// The process's variables, in their order; duplicates too.
    ///
    /// # Errors
    /// Where there is no process, or its environment is not a list of strings.
    pub fn env(&self) -> Result<Vec<(&str, &str)>, SpecError> {
        let process = object_in(&self.root, "process")?.ok_or_else(|| shape("process", "there"))?;
        let Some(variables) = array_in(process, "env")? else { return Ok(Vec::new()) };
        variables
            .iter()
            .map(|variable| {
                let text = variable.as_str().ok_or_else(|| shape("process.env", "a list of strings"))?;
                Ok(text.split_once('=').unwrap_or((text, "")))
            })
            .collect()
    }

    /// The container's namespace of that kind; nothing where it stays in the runtime's.
    pub fn namespace(&self, kind: &str) -> Option<Namespace<'_>> {
        let namespaces = self.root.get("linux")?.get("namespaces")?.as_array()?;
        let namespace = namespaces.iter().find(|namespace| namespace["type"] == kind)?;
        let path = namespace.get("path").and_then(Value::as_str).filter(|path| !path.is_empty());
        Some(Namespace { path })
    }

    /// The mounts, in the order in which they are made.
    pub fn mounts(&self) -> impl Iterator<Item = MountView<'_>> {
        let mounts = self.root.get("mounts").and_then(Value::as_array);
        mounts.into_iter().flatten().filter_map(|mount| {
            let options = mount.get("options").and_then(Value::as_array);
            Some(MountView {
                destination: mount.get("destination")?.as_str()?,
                kind: mount.get("type").and_then(Value::as_str),
                options: options.into_iter().flatten().filter_map(Value::as_str).collect(),
            })
        })
    }

    /// The names of the sysctls that are set for the container.
    pub fn sysctls(&self) -> impl Iterator<Item = &str> {
        let sysctls = self.root.get("linux").and_then(|linux| linux.get("sysctl")).and_then(Value::as_object);
        sysctls.into_iter().flat_map(Map::keys).map(String::as_str)
    }

    /// The paths of the device nodes that the engine makes.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        let devices = self.root.get("linux").and_then(|linux| linux.get("devices")).and_then(Value::as_array);
        devices.into_iter().flatten().filter_map(|device| device.get("path")?.as_str())
    }

    /// Makes the changes.
    ///
    /// # Errors
    /// Where a field that is to be changed is not what the specification says. The document may then hold some of
    /// the changes: drop it.
    pub fn apply(&mut self, edits: &[Edit]) -> Result<(), SpecError> {
        edits.iter().try_for_each(|edit| match edit {
            Edit::SetEnv { name, value } => self.set_env(name, Some(value)),
            Edit::RemoveEnv { name } => self.set_env(name, None),
            Edit::LeaveNamespace { kind } => self.leave_namespace(kind),
            Edit::Mount(mount) => self.mount(mount),
            Edit::RemoveMount { destination } => self.remove_mount(destination),
            Edit::AddHook { stage, hook } => self.add_hook(*stage, hook),
            Edit::Annotate { key, value } => self.annotate(key, value),
        })
    }

    fn set_env(&mut self, name: &str, value: Option<&str>) -> Result<(), SpecError> {
        let process = object_at(&mut self.root, "process")?;
        let variables = array_at(process, "env")?;
        let mut wanted = value.map(|value| Value::from(format!("{name}={value}")));
        variables.retain_mut(|variable| {
            let names_it = variable.as_str().is_some_and(|text| {
                text.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
            });
            if !names_it {
                return true;
            }
            // the first one becomes the wanted one, further ones go
            wanted.take().map(|wanted| *variable = wanted).is_some()
        });
        variables.extend(wanted);
        Ok(())
    }

    fn leave_namespace(&mut self, kind: &str) -> Result<(), SpecError> {
        let linux = object_at(&mut self.root, "linux")?;
        array_at(linux, "namespaces")?.retain(|namespace| namespace["type"] != kind);
        Ok(())
    }

    fn mount(&mut self, mount: &Mount) -> Result<(), SpecError> {
        let wanted = serde_json::to_value(mount)?;
        let mounts = array_at(&mut self.root, "mounts")?;
        let destination = |value: &Value| value.get("destination").and_then(Value::as_str).map(components);
        let target = components(&mount.destination().to_string_lossy());
        let is_target = |value: &Value| destination(value).is_some_and(|at| at == target);
        let hides_target =
            |value: &Value| destination(value).is_some_and(|at| at != target && target.starts_with(&at));
        let first = mounts.iter().position(is_target);
        let last_hiding = mounts.iter().rposition(hides_target);
        let stays = first.filter(|first| last_hiding.is_none_or(|hiding| hiding < *first));
        let mut position = 0;
        mounts.retain(|value| {
            let keep = !is_target(value) || stays == Some(position);
            position += 1;
            keep
        });
        match mounts.iter_mut().find(|value| is_target(value)) {
            Some(value) => *value = wanted,
            None => mounts.push(wanted),
        }
        Ok(())
    }

    fn remove_mount(&mut self, destination: &str) -> Result<(), SpecError> {
        let is_there = |mount: &Value| mount.get("destination").and_then(Value::as_str).map(components);
        let target = components(destination);
        array_at(&mut self.root, "mounts")?.retain(|mount| is_there(mount).is_none_or(|at| at != target));
        Ok(())
    }

    fn add_hook(&mut self, stage: Stage, hook: &Hook) -> Result<(), SpecError> {
        let wanted = serde_json::to_value(hook)?;
        let hooks = object_at(&mut self.root, "hooks")?;
        let hooks = array_at(hooks, stage.key())?;
        match hooks
            .iter_mut()
            .find(|value| value["path"] == wanted["path"] && value["args"] == wanted["args"])
        {
            Some(value) => *value = wanted,
            None => hooks.push(wanted),
        }
        Ok(())
    }

    fn annotate(&mut self, key: &str, value: &str) -> Result<(), SpecError> {
        object_at(&mut self.root, "annotations")?.insert(key.to_owned(), Value::from(value));
        Ok(())
    }
}

impl Stage {
    /// Its key under `hooks`.
    pub const fn key(self) -> &'static str {
        match self {
            Self::CreateRuntime => "createRuntime",
            Self::Poststop => "poststop",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.key())
    }
}

impl Style {
    /// Engines write one line; `runc spec` and people indent.
    fn of(bytes: &[u8]) -> Self {
        let first_key = memchr::memchr(b'"', bytes).unwrap_or(0);
        let before_key = &bytes[..first_key];
        let indent = memchr::memrchr(b'\n', before_key).map(|newline| before_key[newline + 1..].to_vec());
        Self { indent, final_newline: bytes.ends_with(b"\n") }
    }
}

fn write_with(
    bytes: &mut Vec<u8>,
    root: &Map<String, Value>,
    formatter: impl serde_json::ser::Formatter,
) -> Result<(), serde_json::Error> {
    root.serialize(&mut serde_json::Serializer::with_formatter(bytes, formatter))
}

/// The parts of a path, so that `/run//oci-mps/` is `/run/oci-mps`.
fn components(path: &str) -> Vec<std::ffi::OsString> {
    Path::new(path).components().map(|part| part.as_os_str().to_owned()).collect()
}

fn shape(field: impl Into<String>, expected: &'static str) -> SpecError {
    SpecError::Shape { field: field.into(), expected }
}

fn object_in<'a>(
    parent: &'a Map<String, Value>,
    key: &str,
) -> Result<Option<&'a Map<String, Value>>, SpecError> {
    match parent.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(object)) => Ok(Some(object)),
        Some(_) => Err(shape(key, "an object")),
    }
}

fn array_in<'a>(parent: &'a Map<String, Value>, key: &str) -> Result<Option<&'a Vec<Value>>, SpecError> {
    match parent.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(array)) => Ok(Some(array)),
        Some(_) => Err(shape(key, "a list")),
    }
}

/// The object under that key, made where there is none.
fn object_at<'a>(
    parent: &'a mut Map<String, Value>,
    key: &str,
) -> Result<&'a mut Map<String, Value>, SpecError> {
    let value = parent.entry(key).or_insert(Value::Null);
    if value.is_null() {
        *value = json!({});
    }
    value.as_object_mut().ok_or_else(|| shape(key, "an object"))
}

/// The list under that key, made where there is none.
fn array_at<'a>(parent: &'a mut Map<String, Value>, key: &str) -> Result<&'a mut Vec<Value>, SpecError> {
    let value = parent.entry(key).or_insert(Value::Null);
    if value.is_null() {
        *value = json!([]);
    }
    value.as_array_mut().ok_or_else(|| shape(key, "a list"))
}

#[cfg(test)]
mod tests;
