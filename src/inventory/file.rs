//! GPUs as an administrator or a test describes them: TOML, one `[[gpu]]` each.

use std::path::{Path, PathBuf};

use super::{InventoryError, Source, sorted};
use crate::file;
use crate::gpu::{Gpu, Inventory};
use crate::quantity::MemoryQuantity;

/// The inventory file, `/etc/oci-mps/gpus.toml`.
#[derive(Clone, Debug)]
pub struct StaticFile {
    path: PathBuf,
}

impl StaticFile {
    /// The file at `path`.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Understands the file's text.
    ///
    /// # Errors
    /// What is wrong, with its line or the GPU it is about.
    pub fn parse(&self, text: &str) -> Result<Inventory, InventoryError> {
        let path = || self.path.clone();
        let inventory: Inventory = toml::from_str(text).map_err(|error| InventoryError::Parse {
            path: path(),
            message: error.to_string().trim_end().to_owned(),
        })?;
        inventory.gpus.iter().try_for_each(|gpu| self.check(gpu))?;
        if inventory.gpus.is_empty() {
            let advice = Some("; describe each in a [[gpu]] of its own".to_owned());
            return Err(InventoryError::None { who: self.path.display().to_string(), advice });
        }
        sorted(inventory).map_err(|what| InventoryError::Twice { path: path(), what })
    }

    fn check(&self, gpu: &Gpu) -> Result<(), InventoryError> {
        /// Far more than any GPU has, so that a mistake in the unit is seen.
        const MOST_SMS: u32 = 100_000;
        let refuse =
            |key, given| Err(InventoryError::Size { path: self.path.clone(), index: gpu.index, key, given });
        if gpu.memory == MemoryQuantity::ZERO || gpu.memory > MemoryQuantity::MAX {
            return refuse("memory_mib", gpu.memory.mib());
        }
        if !(1..=MOST_SMS).contains(&gpu.sms) {
            return refuse("sms", u64::from(gpu.sms));
        }
        Ok(())
    }
}

impl Source for StaticFile {
    fn read(&self) -> Result<Inventory, InventoryError> {
        let bytes = file::read(&self.path)
            .map_err(|source| InventoryError::Read { path: self.path.clone(), source })?;
        let text = String::from_utf8(bytes)
            .map_err(|error| InventoryError::Parse { path: self.path.clone(), message: error.to_string() })?;
        self.parse(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::ComputeCapability;
    use proptest::prelude::*;
    use rstest::rstest;

    const A: &str = "uuid = \"GPU-11111111-2222-3333-4444-555555555555\"";
    const B: &str = "uuid = \"GPU-66666666-2222-3333-4444-555555555555\"";
    const REST: &str = "name = \"NVIDIA H200\"\nmemory_mib = 143771\ncompute_capability = \"9.0\"\nsms = 132";

    fn parse(text: &str) -> Result<Inventory, String> {
        StaticFile::new(Path::new("/etc/oci-mps/gpus.toml")).parse(text).map_err(|error| error.to_string())
    }

    fn gpu(index: u32, uuid: &str, rest: &str) -> String {
        format!("[[gpu]]\nindex = {index}\n{uuid}\n{rest}\n")
    }

    #[test]
    fn what_the_contract_lists_is_all_it_takes_and_the_order_is_the_indices() {
        let host = parse(&(gpu(1, B, REST) + &gpu(0, A, REST))).unwrap();
        assert_eq!(host.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>(), [0, 1]);
        let first = &host.gpus[0];
        assert_eq!((first.memory.mib(), first.sms, first.mig), (143_771, 132, false));
        assert_eq!(first.compute_capability, ComputeCapability { major: 9, minor: 0 });
    }

    #[rstest]
    #[case::an_unknown_key(gpu(0, A, &REST.replace("sms", "smx")), "line 7", "unknown field `smx`")]
    #[case::a_missing_key(gpu(0, A, &REST.replace("sms = 132", "")), "line 1", "missing field `sms`")]
    #[case::a_foreign_table("[[gpus]]\n".to_owned(), "line 1", "gpus")]
    #[case::a_short_uuid(gpu(0, "uuid = \"GPU-1\"", REST), "line 3", "GPU-1")]
    #[case::a_number_for_a_version(gpu(0, A, &REST.replace("\"9.0\"", "9.0")), "line 6", "9")]
    #[case::not_toml("banana".to_owned(), "line 1", "")]
    #[case::one_index_twice(gpu(0, A, REST) + &gpu(0, B, REST), "two GPUs", "index 0")]
    #[case::one_uuid_twice(gpu(0, A, REST) + &gpu(2, A, REST), "two GPUs", "uuid GPU-11111111")]
    #[case::no_memory(gpu(3, A, &REST.replace("143771", "0")), "GPU 3", "memory_mib = 0")]
    #[case::no_sms(gpu(3, A, &REST.replace("132", "0")), "GPU 3", "sms = 0")]
    #[case::too_many_sms(gpu(3, A, &REST.replace("132", "4294967295")), "GPU 3", "sms = 4294967295")]
    #[case::more_memory_than_there_can_be(
        gpu(3, A, &REST.replace("143771", "9007199254740993")),
        "GPU 3",
        "memory_mib = 9007199254740993"
    )]
    #[case::nothing(String::new(), "knows no GPU", "[[gpu]]")]
    fn anything_else_is_refused_and_says_where(
        #[case] text: String,
        #[case] r#where: &str,
        #[case] what: &str,
    ) {
        let error = parse(&text).unwrap_err();
        assert!(error.contains("/etc/oci-mps/gpus.toml"), "{error}");
        assert!(error.contains(r#where) && error.contains(what), "{error}");
    }

    #[test]
    fn a_missing_file_says_what_to_do() {
        let error = StaticFile::new(Path::new("/nonexistent/gpus.toml")).read().unwrap_err().to_string();
        assert!(error.contains("/nonexistent/gpus.toml") && error.contains("source = \"nvml\""), "{error}");
    }

    proptest! {
        #[test]
        fn no_text_is_a_panic(text in "(?s).{0,200}") {
            let _ = parse(&text);
        }

        #[test]
        fn no_values_are_a_panic(index: u64, memory: u64, sms: i64, version in "[0-9.]{0,12}") {
            let rest = format!(
                "name = \"\"\nmemory_mib = {memory}\ncompute_capability = \"{version}\"\nsms = {sms}"
            );
            let _ = parse(&format!("[[gpu]]\nindex = {index}\n{A}\n{rest}"));
        }
    }
}
