"""Edits that make the product wrong, and the nearest tests of each: at least one of these must fail.

An edit names its file and its text. Where either has moved, say here where to; where a rule was dropped, drop
its line.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    name: str
    file: str
    old: str  # stands there once
    new: str
    tests: tuple[str, ...]  # file::function below tests/


MUTATIONS = [
    Mutation(
        "the encoder's revision is left out of the visual key",
        "vlm/spec.py",
        "self.revision, *filter(",
        "*filter(",
        ("test_visual_key.py::test_every_part_makes_a_key_of_its_own",),
    ),
    Mutation(
        "the variant is left out of the tiles' key",
        "preprocess/stage.py",
        "        spec.variant,\n        ",
        "        ",
        ("test_visual_key.py::test_every_part_makes_a_key_of_its_own",),
    ),
    Mutation(
        "an image is left out of the keys of the blocks that it touches",
        "llm/scheduling/prefix.py",
        "image_touches(spans, start, start + size) if start < group.spans_end else ()",
        "()",
        ("test_engine_images.py::test_same_ids_with_another_image_never_share_a_block",),
    ),
    Mutation(
        "preemption ignores the batch class",
        "llm/scheduling/sequence_admission.py",
        'if other.priority == "batch":',
        "if True:",
        ("test_preemption.py::test_an_interactive_request_is_never_preempted_for_another",),
    ),
    Mutation(
        "batch work preempts batch work",
        "llm/scheduling/sequence_admission.py",
        '            if group.priority == "interactive":\n                victims',
        "            if True:\n                victims",
        ("test_preemption.py::test_batch_work_never_preempts_batch_work_to_start",),
    ),
    Mutation(
        "num_exclusive counts shared blocks",
        "llm/scheduling/preempt.py",
        "self._pool.refs[block] == count",
        "self._pool.refs[block] >= count",
        ("test_preemption.py::test_num_exclusive_is_what_a_release_frees",),
    ),
    Mutation(
        "a rate bucket has no cap",
        "vlm/api/guard/quotas.py",
        "min(float(per_minute), bucket.level + (now - bucket.at) * per_minute / 60)",
        "bucket.level + (now - bucket.at) * per_minute / 60",
        ("test_api_security.py::test_a_quiet_hour_saves_up_no_more_than_a_minutes_requests",),
    ),
    Mutation(
        "bodies in flight are not capped",
        "vlm/api/guard/middleware.py",
        "if others and self._service.body_bytes >",
        "if False and self._service.body_bytes >",
        ("test_api_limits.py::test_bodies_in_flight_are_capped_together",),
    ),
    Mutation(
        "a route is open unless it says otherwise",
        "vlm/api/guard/routes.py",
        'is_open = bool(self.openapi_extra) and (self.openapi_extra or {}).get("security") == []',
        "is_open = not self.openapi_extra",
        ("test_api_security.py::test_every_route_asks_for_a_key_but_the_named_few",),
    ),
    Mutation(
        "a folder is not synced",
        "vlm/requests/durable.py",
        "        os.fsync(fd)\n    finally",
        "        pass\n    finally",
        ("test_durable.py",),
    ),
    Mutation(
        "a stored file's name is not synced",
        "vlm/api/storage/files.py",
        "        sync_folder(meta.parent)\n",
        "",
        ("test_durable.py::test_a_stored_file_keeps_its_name",),
    ),
    Mutation(
        "a row is told before it is on disk",
        "vlm/requests/durable.py",
        "                os.fsync(fd)\n            except OSError",
        "                pass\n            except OSError",
        ("test_caption_journal.py::test_a_row_is_on_disk_when_append_returns",),
    ),
    Mutation(
        "a process that draws PDF pages may use all memory",
        "workers/children/page_process.py",
        "    limit_memory(total_bytes=limits.memory_mb << 20)\n",
        "",
        ("test_child_limits.py::test_a_process_that_draws_pdf_pages_has_the_memory_it_may_use",),
    ),
    Mutation(
        "a PDF page has no timer of processor time",
        "workers/children/page_process.py",
        "limit_cpu(limits.page_cpu_s)",
        "pass",
        ("test_child_limits.py::test_a_page_that_draws_for_long_ends_by_its_processor_time",),
    ),
    Mutation(
        "a process that compiles grammars may use all memory",
        "workers/children/grammar_process.py",
        "    limit_memory(total_bytes=_MEMORY_BYTES)\n",
        "",
        ("test_child_limits.py::test_a_process_that_compiles_grammars_has_the_memory_it_may_use",),
    ),
    Mutation(
        "a message that comes twice is begun twice",
        "workers/cluster/names.py",
        "replica, nx=True, px=ttl_ms",
        "replica, px=ttl_ms",
        ("test_remote_engine.py::test_a_message_redelivered_to_a_node_that_says_nothing_is_not_begun_again",),
    ),
    Mutation(
        "attempts at poison work never end",
        "workers/cluster/ledger.py",
        ">= tonumber(ARGV[3]) then return 'exhausted'",
        ">= 999 then return 'exhausted'",
        ("test_ledger.py::test_attempts_count_deaths_and_end",),
    ),
    Mutation(
        "an inner address is taken for one of the internet",
        "vlm/api/storage/addresses.py",
        '            "168.63.129.16/32",  # Azure\'s own services, on every host of it\n',
        "",
        ("test_api_fetch.py::test_no_special_range_is_the_internet_whatever_pythons_own_table_says",),
    ),
    Mutation(
        "a library is taken that the CPU can't run",
        "llm/backend/native_build.py",
        "if not features <= cpu_flags():",
        "if not features & cpu_flags():",
        ("test_native_levels.py::test_a_cpu_runs_the_levels_whose_features_it_lists",),
    ),
    Mutation(
        "an edited source is served by the library of the old one",
        "llm/backend/native_build.py",
        "for part in (*sources, ",
        "for part in (",
        ("test_native_levels.py::test_an_edited_source_is_compiled_and_never_served_by_an_older_library",),
    ),
    Mutation(
        "sources come before packages in the image",
        "Dockerfile",
        "COPY pyproject.toml constraints.txt ./",
        "COPY pyproject.toml constraints.txt vlm/ ./",
        ("test_deployment.py::test_an_edited_source_installs_no_package_again",),
    ),
    Mutation(
        "the image that serves has a compiler",
        "Dockerfile",
        "--no-install-recommends fonts-dejavu-core",
        "--no-install-recommends g++ fonts-dejavu-core",
        ("test_deployment.py::test_no_image_holds_a_compiler_or_headers",),
    ),
    Mutation(
        "Redis evicts queues",
        "compose.yaml",
        '"noeviction"',
        '"allkeys-lru"',
        ("test_deployment.py::test_redis_never_evicts_a_queue_and_keeps_it",),
    ),
    Mutation(
        "a package is imported that nobody declared",
        "pyproject.toml",
        '    "h11>=0.14",\n',
        "",
        ("test_dependencies.py::test_what_is_imported_is_declared",),
    ),
    Mutation(
        "the kernel lets a row see one key too many",
        "llm/backend/cuda/paged_attention.py",
        "seen = key[None, :] < bound[:, None]",
        "seen = key[None, :] <= bound[:, None]",
        ("test_paged_attention.py::test_attention_is_that_of_the_torch_backend_on_any_shapes",),
    ),
    Mutation(
        "padding of a captured step writes to the first block",
        "llm/backend/cuda/paged_backend.py",
        "self._spare_slot = num_blocks * block_size",
        "self._spare_slot = 0",
        ("test_cuda_steps.py::test_padding_of_a_bucket_touches_no_block_of_anybodys",),
    ),
    Mutation(
        "a pinned buffer is written while it may still be copied",
        "llm/backend/cuda/step_batch.py",
        "            pending.synchronize()\n",
        "            pass\n",
        ("test_cuda_steps.py::test_a_step_is_read_as_it_was_written_however_late_it_is_copied",),
    ),
    Mutation(
        "the tower's arithmetic is left out of the encoder's revision",
        "encoder/revision.py",
        'if arithmetic == "float32":',
        "if True:",
        ("test_encoder_arithmetic.py::test_every_part_that_makes_a_key_knows_the_arithmetic",),
    ),
    Mutation(
        "tiles of another grid are taken from shared memory",
        "preprocess/wire.py",
        "if planned is not None and grid != planned:",
        "if False:",
        ("test_sealed_memory.py::test_memory_that_can_not_be_these_tiles_is_refused_and_closed",),
    ),
    Mutation(
        "shared memory is not sealed against its writer",
        "workers/contract/sealed_memory.py",
        "fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())",
        "pass",
        ("test_sealed_memory.py::test_what_is_sealed_stays_as_it_was_written",),
    ),
    Mutation(
        "tiles pass to the engine through the socket",
        "workers/local/engine_process.py",
        "if isinstance(tiles, SealedTiles):",
        "if False:",
        (
            "test_image_path.py::"
            "test_an_image_is_parsed_once_a_process_and_hashed_once_and_its_tiles_are_written_once",
        ),
    ),
    Mutation(
        "a node sends an encoder tiles that the store has",
        "workers/cluster/node/remote_visuals.py",
        "if isinstance(tiles, StoredTiles) and tiles.url == self._store_url:",
        "if False:",
        (
            "test_remote_engine.py::test_tiles_that_are_in_the_store_already_are_read_from_there_and_not_sent_again",
        ),
    ),
    Mutation(
        "a damaged file of the disk cache is read",
        "workers/local/disk_store.py",
        " or _digest(content) != digest:",
        ":",
        ("test_disk_cache.py::test_a_torn_or_damaged_file_is_a_miss_and_goes",),
    ),
    Mutation(
        "blocks that were read are put where others belong",
        "llm/scheduling/saved_prefixes.py",
        "saved = saved[len(hits) - start :]",
        "saved = saved[len(hits) - start + 1 :]",
        ("test_saved_prefixes.py::test_answers_do_not_depend_on_what_the_store_has_kept",),
    ),
    Mutation(
        "another server is not asked for a sampling parameter",
        "vlm/remote/chat_body.py",
        '    "min_p": 0.0,\n',
        "",
        ("test_upstream.py::test_every_parameter_is_sent_or_refused_by_name",),
    ),
    Mutation(
        "a stored response is read with any key",
        "vlm/api/openai_responses/response_store.py",
        "self._kept.get((caller, response_id))",
        "next((kept for (_, name), kept in self._kept.items() if name == response_id), None)",
        ("test_responses.py::test_no_key_reads_responses_of_another",),
    ),
    Mutation(
        "an image is fetched from a host that is not listed",
        "vlm/api/storage/fetch.py",
        "if not self._allowed.has_host(parsed.host):",
        "if False:",
        ("test_api_fetch.py::test_hosts_that_are_not_listed_are_refused_before_they_are_looked_up",),
    ),
    Mutation(
        "an unknown parameter is dropped",
        "vlm/requests/tool_schemas.py",
        'extra="forbid"',
        'extra="ignore"',
        ("test_known_parameters.py::test_no_unknown_parameter_is_dropped",),
    ),
]
