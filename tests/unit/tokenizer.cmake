# Tokenizer and chat templates. tokenizer_cases unpacks the four published tokenizers with xz; without xz it is skipped.
if(TARGET epx_engine)
  epx_add_test(NAME unit_utf8 SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/utf8_test.c LIBS epx_engine LABELS unit)
  epx_add_test(NAME unit_tokenizer SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/tokenizer_test.c LIBS epx_engine LABELS unit)
  epx_add_test(NAME unit_tokenizer_cases SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/tokenizer_cases_test.c LIBS epx_engine LABELS unit
    TIMEOUT 180)
  epx_add_test(NAME unit_chat_template SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/chat_template_test.c LIBS epx_engine LABELS unit)
endif()
