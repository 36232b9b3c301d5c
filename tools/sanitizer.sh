# The CUDA tests that are short enough for compute-sanitizer, and how they run under it. Sourced by check and gpu_check.sh.

sanitized_tests=(
  'Cuda*/RecurrenceLaws/*.VarlenPrefillFoldsRings' 'Cuda*/RecurrenceLaws/*.RollbackMovesNoStateBytes'
  'Cuda*/RecurrenceLaws/*.MaterialiseAtEveryPositionLeavesTheSource' 'Cuda*/RecurrenceLaws/*.ABadNumberStaysHome'
  'Cuda*/CudaRecurrence/*.ShortOutputsAreLongOnesRounded' 'Cuda*/CudaRecurrence/*.PlanesAreWords'
  'Cuda*/CudaRecurrence/*.ARowOutsideThePoolIsNamed' 'Cuda*/CudaRecurrence/*.PrefillInChunksHasTheBitsOfSteps'
  'CudaMoves.LargePieces' 'CudaPool.*' CudaDelta.{StridesAndSeparateCheckpoints,LargeTokensStayFinite}
  'CudaMamba2.StridesAndSeparateCheckpoints' 'CudaDeviceTest.CommitRowsMovesCursors'
  CudaLayer.{GatedDeltaNet,KimiDeltaAttention,Mamba2} CudaConv1d.{RollsBack,BatchAndPaddingAreNothing}
  CudaAttention.{AnyAlignmentIsRight,LargeScoresStayFinite,NamesARowOfTooManyTokens} 'CudaGates.*MatchTheFormula' CudaNorm.{InPlaceHasTheSameBits,GateFirstRmsNormMatchesTheOracle})

# The path of compute-sanitizer, or nothing.
find_sanitizer() {
  PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer command -v compute-sanitizer
}

# run_sanitizer TOOL TESTS: runs those tests of the binary TESTS under memcheck or racecheck; any finding is a failure, and so
# are five minutes.
run_sanitizer() {
  local filter
  filter=$(IFS=:; echo "${sanitized_tests[*]}")
  timeout 300 "$(find_sanitizer)" --tool "$1" --error-exitcode 9 "$2" --gtest_filter="$filter"
}
