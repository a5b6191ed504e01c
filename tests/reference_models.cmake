# The reference checkpoints of tests/data/reference/<name> with their weights unpacked, in <build>/tests/reference/<name>.
set(EPX_REFERENCE_MODELS mixtral qwen2_moe olmoe glm4_moe deepseek_v2 deepseek_v3 gpt_oss qwen3_moe_fp8)
find_program(EPX_XZ xz REQUIRED)
set(unpacked)
foreach(name qwen3_moe ${EPX_REFERENCE_MODELS})
  set(from ${PROJECT_SOURCE_DIR}/tests/data/reference/${name})
  set(to ${EPX_REFERENCE_DIR}/${name})
  add_custom_command(OUTPUT ${to}/model.safetensors
    COMMAND ${CMAKE_COMMAND} -E make_directory ${to}
    COMMAND ${CMAKE_COMMAND} -E copy ${from}/config.json ${from}/reference.json ${from}/reference.safetensors ${to}
    COMMAND ${EPX_XZ} -dc ${from}/model.safetensors.xz > ${to}/model.safetensors
    DEPENDS ${from}/model.safetensors.xz ${from}/config.json ${from}/reference.json ${from}/reference.safetensors VERBATIM)
  list(APPEND unpacked ${to}/model.safetensors)
endforeach()
add_custom_target(epx_reference_models ALL DEPENDS ${unpacked})
